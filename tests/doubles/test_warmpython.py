"""The warm interpreter, compared with the real interpreter."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from doubles import warmpython

pytestmark = pytest.mark.slow

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TELL = """
import atexit, os, sys
import beside
atexit.register(lambda: print("the end", flush=True))
print(sys.argv, __name__, os.getcwd(), os.environ["WORD"], "OTHER" in os.environ, beside.__file__)
print("x" * 5, file=sys.stderr)
what = sys.argv[1]
if what == "exit":
    sys.exit(75)
if what == "raise":
    raise ValueError("boom")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the script and a module beside it."""
    (tmp_path / "tell.py").write_text(TELL)
    (tmp_path / "beside.py").touch()
    return tmp_path


@pytest.mark.parametrize("what", ["leave", "exit", "raise"])
@pytest.mark.parametrize("how", [["tell.py"], ["-m", "tell"]])
def test_warm_run_equals_a_real_run(folder: Path, how: list[str], what: str) -> None:
    """Exit code and output are equal, to the last line of a traceback; arguments, folder and environment arrive."""
    env = {"PATH": os.environ["PATH"], "WORD": "a b"}
    warm = warmpython.run([*how, what, ""], folder, env, 60)
    cold = subprocess.run(
        [sys.executable, *how, what, ""], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert (warm.returncode, warm.stdout) == (cold.returncode, cold.stdout)
    assert warm.stderr.splitlines()[::-1][:1] == cold.stderr.splitlines()[::-1][:1]


def test_ranks_of_torchrun_are_warm(folder: Path) -> None:
    """Each rank has torchrun's environment; torchrun's verdict names the failed rank."""
    (folder / "rank.py").write_text(
        "import os, sys\nwarm = 'cloudtrain.entrypoints.trainer.train' in sys.modules or 'torch' in sys.modules\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], warm, os.getpid() == os.getsid(0), flush=True)\n"
        "sys.exit(75 * int(os.environ['RANK']))\n"
    )
    done = warmpython.run([*TORCHRUN, "rank.py"], folder, dict(os.environ), 60)
    assert sorted(done.stdout.splitlines()) == ["0 2 True True", "1 2 True True"]
    assert (done.returncode, "exitcode  : 75" in done.stderr) == (1, True)


def test_killed_process_returns_its_signal(folder: Path) -> None:
    """The return code has the signal, as with subprocess."""
    (folder / "kill.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    assert warmpython.run(["kill.py"], folder, dict(os.environ), 60).returncode == -9


def test_processes_left_behind_are_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in a new session is found and killed, too."""
    monkeypatch.setattr(warmpython, "LEFT_S", 0.2)
    child = "import subprocess; print(subprocess.Popen(['sleep', '300'], start_new_session=True).pid)"
    (folder / "leave.py").write_text(child)
    with pytest.raises(AssertionError, match="left behind"):
        warmpython.run(["leave.py"], folder, dict(os.environ), 60)
    (folder / "next.py").touch()
    assert warmpython.run(["next.py"], folder, dict(os.environ), 60).returncode == 0


def test_run_over_its_time_limit_is_killed(folder: Path) -> None:
    """The timeout kills the run with all its processes."""
    (folder / "long.py").write_text("import subprocess\nsubprocess.run(['sleep', '300'])\n")
    with pytest.raises(subprocess.TimeoutExpired):
        warmpython.run(["long.py"], folder, dict(os.environ), 1)
    (folder / "next.py").touch()
    assert warmpython.run(["next.py"], folder, dict(os.environ), 60).returncode == 0


def test_process_gives_lines_takes_signals_and_tells_its_end(folder: Path) -> None:
    """A line arrives while the process runs; `communicate` has a limit, and reads the rest after the end."""
    (folder / "wait.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    process = warmpython.Process(["wait.py"], folder, dict(os.environ), ())
    assert process.stdout.readline() == "ready\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=0.1)
    process.kill()
    assert (process.communicate(timeout=30), process.poll()) == (("", ""), -signal.SIGKILL)


@pytest.mark.parametrize("what", ["leave", "exit", "raise"])
def test_process_has_the_output_and_the_code_of_a_run(folder: Path, what: str) -> None:
    """Both streams and the code equal those of a run to its end."""
    env = {"PATH": os.environ["PATH"], "WORD": "a b"}
    process = warmpython.Process(["tell.py", what], folder, env, ())
    out, err = process.communicate(timeout=60)
    whole = warmpython.run(["tell.py", what], folder, env, 60)
    assert (process.returncode, out, err) == (whole.returncode, whole.stdout, whole.stderr)
