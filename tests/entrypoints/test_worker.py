"""The worker of one rank: a script runs as under python itself, and the cause of the end is recorded."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cloudtrain.entrypoints.agent import worker
from cloudtrain.entrypoints.errors import TaskError

SCRIPT = """
import pickle, sys
from multiprocessing import get_context
class Thing: pass
def job(thing): return type(thing).__module__
if __name__ == "__main__":
    print(sys.argv, __file__, __package__, __spec__, sys.path[0])
    with get_context("spawn").Pool(1) as pool:
        print(pool.apply(job, (pickle.loads(pickle.dumps(Thing())),)))
"""


MEET = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
DESTROYED = f"{MEET}try:\n    {{}}\nfinally:\n    dist.destroy_process_group()\n"


def run(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the worker in `folder` as rank 3."""
    return subprocess.run(
        [sys.executable, "-u", "-m", "cloudtrain.entrypoints.agent.worker", *command],
        cwd=folder,
        env={**os.environ, "RANK": "3", "CLOUDTRAIN_RESULT_DIR": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def failure(folder: Path) -> Any:
    """Return rank 3's record."""
    return json.loads((folder / "rank-3.json").read_text())


def test_script_runs_as_under_python(tmp_path: Path) -> None:
    """argv, __file__, __main__, sys.path and spawned processes are as under `python train.py`."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text(SCRIPT)
    command = ["sub/train.py", "--lr", "1 2"]
    plain = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=True)
    ours = run(tmp_path, "script", *command)
    assert ours.stdout == plain.stdout, ours.stderr


def test_module_runs_as_python_m(tmp_path: Path) -> None:
    """`python -m pkg.train` and ours print the same."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text("import sys\nprint(sys.argv[1:], __name__, __package__)")
    plain = subprocess.run(
        [sys.executable, "-m", "pkg.train", "-x"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run(tmp_path, "module", "pkg.train", "-x").stdout == plain.stdout


@pytest.mark.parametrize(
    ("kind", "command", "ours"), [("script", "train.py", "sub/train.py"), ("module", "-m train", "train")]
)
def test_script_starts_in_the_folder_that_the_config_names(tmp_path: Path, kind: str, command: str, ours: str) -> None:
    """With `distributed.workdir: sub`, all is as after `cd sub`."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text("import os, sys\nprint(os.getcwd(), sys.argv, sys.path[0], __file__)")
    python = [sys.executable, *command.split(), "-x"]
    plain = subprocess.run(python, cwd=tmp_path / "sub", capture_output=True, text=True, check=True)
    own = {"CLOUDTRAIN_CODE_DIR": str(tmp_path), "CLOUDTRAIN_WORKDIR": "sub"}
    assert run(tmp_path, kind, ours, "-x", **own).stdout == plain.stdout


@pytest.mark.parametrize("name", ["random", "signal", "dataclasses", "pathlib"])
def test_names_of_the_standard_library_break_nothing_of_ours(tmp_path: Path, name: str) -> None:
    """The code's root and the job's PYTHONPATH are for the script: torchrun and the worker import the library's own."""
    for folder in (code := tmp_path / "code", tmp_path / "own", code / "src"):
        folder.mkdir()
    for folder in (code, tmp_path / "own"):
        (folder / f"{name}.py").write_text("MINE = True\n")
    (code / "src/train.py").write_text(
        f"import os, sys\nprint(sys.path[:2], os.getcwd(), os.environ['PYTHONPATH'])\n"
        f"del sys.modules[{name!r}]\nimport {name}\nprint({name}.MINE)\n"
    )
    path = {"PYTHONPATH": "/machine", "CLOUDTRAIN_PYTHONPATH": str(tmp_path / "own"), "CLOUDTRAIN_CODE_DIR": str(code)}
    ended = run(tmp_path, "script", "src/train.py", **path)
    own = tmp_path / "own"
    assert ended.stdout.splitlines() == [f"{[str(code / 'src'), str(own)]} {code} /machine:{own}", "True"], ended.stderr


@pytest.mark.parametrize("kind", ["script", "module"])
def test_packages_at_the_codes_root_are_found_last(tmp_path: Path, kind: str) -> None:
    """A script in a subfolder imports them, as under the clouds' toolkits; installed packages and its own win."""
    for folder in (code := tmp_path / "code", code / "pipeline", code / "mine", tmp_path / "installed"):
        folder.mkdir()
    (code / "mine/__init__.py").write_text("")
    for place in (code, code / "pipeline", tmp_path / "installed"):
        (place / ("installed.py" if place.name == "installed" else "own.py")).write_text(f"AT = {place.name!r}\n")
    for name in ("installed", "colorsys", "own"):
        (code / f"{name}.py").write_text("AT = 'code'\n")
    (code / "pipeline/deep").mkdir()
    (code / "pipeline/deep/near.py").write_text("import own, mine\nprint(own.AT)\n")
    (code / "pipeline/train.py").write_text("import colorsys, installed, mine, own\ncolorsys.hls_to_rgb\nprint(own.AT)")
    path = {"PYTHONPATH": f"{Path(__file__).parents[2] / 'typings'}{os.pathsep}{tmp_path / 'installed'}"}
    told = {"CLOUDTRAIN_CODE_DIR": str(code), "CLOUDTRAIN_WORKDIR": "pipeline", **path}
    for target in {"script": ("pipeline/train.py", "pipeline/deep/near.py"), "module": ("train", "deep.near")}[kind]:
        ended = run(tmp_path, kind, target, **told)
        assert ended.stdout == "pipeline\n", ended.stderr


def test_source_of_the_script_is_found_from_any_folder(tmp_path: Path) -> None:
    """A script may change the folder: `__main__`'s code has an absolute file name, as under python."""
    (tmp_path / "train.py").write_text(
        "import inspect, os\ndef f(): pass\nos.chdir('/')\nprint(inspect.getsource(f))\n"
    )
    assert run(tmp_path, "script", "train.py").stdout == "def f(): pass\n\n"


@pytest.mark.parametrize(("restarts", "count"), [({}, "2"), ({"CLOUDTRAIN_RESTART": "3"}, "5")])
def test_run_has_the_jobs_id_and_its_restarts(tmp_path: Path, restarts: dict[str, str], count: str) -> None:
    """torchrun knows neither the job nor the restarts by the agents."""
    (tmp_path / "train.py").write_text(
        "import os\nprint(os.environ['TORCHELASTIC_RUN_ID'], os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    )
    given = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2", "CLOUDTRAIN_JOB": "j", **restarts}
    assert run(tmp_path, "script", "train.py", CLOUDTRAIN_ATTEMPT="4", **given).stdout == f"j-4 {count}\n"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"RANK": "0"}, ["digits-abcde", "allow", "digits", '{"cloudtrain.job": "digits-abcde"}']),
        ({"RANK": "1"}, [None] * 4),
        ({"RANK": "0", "CLOUDTRAIN_TRACKED_AS": ""}, [None] * 4),
        (
            {"RANK": "0", "WANDB_RUN_ID": "own", "WANDB_RUN_GROUP": "mine", "MLFLOW_RUN_CONTEXT": "{}"},
            ["own", None, "mine", "{}"],
        ),
    ],
)
def test_rank_0_names_the_run_of_a_tracker(tmp_path: Path, given: dict[str, str], told: list[str | None]) -> None:
    """The id is the same in all attempts; the job's own variables win."""
    (tmp_path / "train.py").write_text(
        "import os\nnames = 'WANDB_RUN_ID WANDB_RESUME WANDB_RUN_GROUP MLFLOW_RUN_CONTEXT'.split()\n"
        "print([os.environ.get(name) for name in names])\n"
    )
    known = {"CLOUDTRAIN_TRACKED_AS": "digits", "CLOUDTRAIN_JOB": "digits-abcde"}
    assert run(tmp_path, "script", "train.py", **known | given).stdout == f"{told}\n"


def test_slurms_numbers_are_the_ranks_own(tmp_path: Path) -> None:
    """Slurm knows one task a node: of its variables, if shown, those that libraries compare with RANK agree with it."""
    (tmp_path / "train.py").write_text(
        "import os\nprint([os.environ['SLURM_' + name] for name in 'PROCID LOCALID NTASKS NTASKS_PER_NODE'.split()])\n"
    )
    shown = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
    rank = {"LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    node = {"CLOUDTRAIN_NODE_RANK": "1", "CLOUDTRAIN_NUM_NODES": "2"}
    assert run(tmp_path, "script", "train.py", **shown, **rank, **node).stdout == "['3', '1', '4', '2']\n"


def test_exception_is_recorded_with_its_rank(tmp_path: Path) -> None:
    """The record has type, message and the user's own frames, which torchrun's ChildFailedError hides; no mark."""
    (tmp_path / "train.py").write_text("def f():\n    raise ValueError('boom')\nf()\n")
    ended = run(tmp_path, "script", "train.py")
    told = failure(tmp_path)
    assert (ended.returncode, (tmp_path / "left-3").exists()) == (1, False)
    assert (told["rank"], told["type"], told["message"], told["peer_lost"]) == (3, "ValueError", "boom", False)
    assert "worker.py" not in told["traceback"]
    assert told["traceback"] == ended.stderr


@pytest.mark.parametrize(("first", "last"), [("hook", "x\nHOOK\n"), ("sys.__excepthook__", "ValueError: x\n")])
def test_scripts_own_hook_has_the_exception(tmp_path: Path, first: str, last: str) -> None:
    """A crash reporter's hook is called, also below torch's hook, which would print the rank before each line."""
    lines = "import sys\ndef hook(*given):\n    sys.__excepthook__(*given)\n    print('HOOK', file=sys.stderr)\n"
    (tmp_path / "train.py").write_text(f"{lines}sys.excepthook = {first}\n{MEET}raise ValueError('x')")
    shown = run(tmp_path, "script", "train.py").stderr
    assert "worker.py" not in shown
    assert (shown.endswith(last), "[rank" in shown, failure(tmp_path)["message"]) == (True, False, "x")


def test_deep_library_leaves_the_users_frame(tmp_path: Path) -> None:
    """The record is cut, but the frame of the script, reached through a link, stays with a relative path."""
    code, library = tmp_path / "code", tmp_path / "library"
    code.mkdir()
    library.mkdir()
    (code / "train.py").write_text("import data\ndata.load()\n")
    (code / "data.py").write_text("import deep\ndef load():\n    deep.f0(1)\n")
    calls = "".join(f"def f{n}(x):\n    return f{n + 1}(x)  # {'.' * 60}\n" for n in range(200))
    (library / "deep.py").write_text(f"{calls}def f200(x):\n    raise ValueError('boom')\n")
    (tmp_path / "link").symlink_to(code)
    link = str(tmp_path / "link")
    run(tmp_path, "script", f"{link}/train.py", PYTHONPATH=str(library), CLOUDTRAIN_CODE_DIR=link)
    told = json.loads((tmp_path / "rank-3.json").read_text())["traceback"]
    assert len(told) < 17_000
    assert '  File "data.py", line 3, in load\n    deep.f0(1)\n' in told
    assert told.endswith("ValueError: boom")


@pytest.mark.parametrize("stream", ["None", "object()", "Blunt()"])
def test_cause_is_recorded_despite_the_scripts_stdout(tmp_path: Path, stream: str) -> None:
    """A script may replace Python's stream, with a stream without flush or with a failing flush."""
    blunt = "import sys\nclass Blunt:\n    def flush(self): raise RuntimeError('gone')\n"
    (tmp_path / "train.py").write_text(f"{blunt}sys.stdout = {stream}\nraise ValueError('boom')\n")
    ended = run(tmp_path, "script", "train.py")
    assert (ended.returncode in (1, 120), failure(tmp_path)["message"]) == (True, "boom")  # 120: flush failed
    assert "ValueError: boom" in ended.stderr


@pytest.mark.parametrize("code", [None, 0, 3])
def test_exit_of_a_task_before_its_end_is_an_error(code: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With code 0 only the other ranks would fail, by the lost connection."""

    def leave() -> NoReturn:
        sys.exit(code)

    monkeypatch.setattr("cloudtrain.entrypoints.trainer.train.main", leave)
    with pytest.raises(SystemExit if code else TaskError, match="3" if code else "before the training was done"):
        worker._run_own(worker._RankProcess(1, None), "task")


def test_exit_of_the_script_is_kept(tmp_path: Path) -> None:
    """`sys.exit(5)` is the script's own code, no exception; `sys.exit("no data")` gives the cause and exits 1.

    Only a rank that is done, or has saved, leaves the mark of its end.
    """
    (tmp_path / "train.py").write_text("import sys\nsys.exit(5)\n")
    assert run(tmp_path, "script", "train.py").returncode == 5
    assert sorted(os.listdir(tmp_path)) == ["steps-3", "train.py"]  # no record, no mark
    (tmp_path / "train.py").write_text("import sys\nsys.exit('no data')\n")
    ended = run(tmp_path, "script", "train.py")
    assert (ended.returncode, ended.stderr, failure(tmp_path)["message"]) == (1, "no data\n", "no data")
    assert not (tmp_path / "left-3").exists()


@pytest.mark.parametrize(
    ("script", "message", "is_echo"),
    [
        (MEET + "{}", "[gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:2", True),
        (MEET + "{}", "NCCL communicator was aborted on rank 1", True),
        ("{}", "Distributed package does not have NCCL built in", False),
        (DESTROYED, "[gloo/transport/tcp/pair.cc:553] Read error", True),
        (DESTROYED, "broken pipe", False),
    ],
)
def test_lost_peer_is_marked_once_the_ranks_have_met(tmp_path: Path, script: str, message: str, is_echo: bool) -> None:
    """An error after a peer's death is an echo; the same words of a script's own connection are a real cause.

    A script that destroys its group in a `finally` still raises an echo; its own broken pipe is no echo.
    """
    (tmp_path / "train.py").write_text(script.format(f"raise RuntimeError({message!r})"))
    run(tmp_path, "script", "train.py")
    assert failure(tmp_path)["peer_lost"] is is_echo


INIT = """
import datetime, os, torch.distributed as dist
{}
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1){})
"""


@pytest.mark.parametrize(
    ("lines", "argument", "words"),
    [
        (
            'os.environ["MASTER_ADDR"] = "localhost"',
            "",
            "MASTER_ADDR localhost, set by the script; they meet at 127.0.0.1:1:",
        ),
        ('os.environ["MASTER_PORT"] = "12355"', "", "by MASTER_PORT 12355, set"),
        (
            "",
            ', init_method="tcp://127.0.0.1:23456", rank=3, world_size=4',
            "by init_method tcp://127.0.0.1:23456, set",
        ),
        ('os.environ["WORLD_SIZE"] = "8"', "", "by WORLD_SIZE 8, given as 4, set"),
        ('os.environ["RANK"] = "1"', "", "by RANK 1, given as 3, set"),
        (
            "store = dist.TCPStore('localhost', 0, is_master=True)",
            ", store=store, rank=3, world_size=4",
            "by the store at localhost, set",
        ),
        ("", ', init_method="env://", rank=3, world_size=4', ""),
        ("", "", ""),
    ],
)
def test_place_of_the_scripts_own_is_named(tmp_path: Path, lines: str, argument: str, words: str) -> None:
    """A rank that looks for the others elsewhere says both addresses, and is no echo of a lost peer."""
    (tmp_path / "train.py").write_text(INIT.format(lines, argument))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    run(tmp_path, "script", "train.py", **place)
    told = failure(tmp_path)
    assert (words in told["message"], "set by the script" in told["message"]) == (True, bool(words))
    assert told["peer_lost"] is (not words)


def test_log_goes_to_the_ranks_own_file(tmp_path: Path) -> None:
    """Output of the script and of its children lands in rank-3.log, in order."""
    (tmp_path / "train.py").write_text("import os\nprint('one')\nos.system('echo two')\nprint('three')")
    assert run(tmp_path, "script", "train.py", CLOUDTRAIN_LOG_DIR=str(tmp_path)).stdout == ""
    assert (tmp_path / "rank-3.log").read_text() == "one\ntwo\nthree\n"


def test_missing_script_is_reported(tmp_path: Path) -> None:
    """The record contains the file's name."""
    run(tmp_path, "script", "nowhere.py")
    assert "nowhere.py" in failure(tmp_path)["message"]


# An exit handler and a thread that the interpreter waits for: both are part of the work.
ENDING = """
import atexit, os, threading, time
mark = os.environ["CLOUDTRAIN_RESULT_DIR"] + "/left-3"
def late():
    time.sleep(0.2)
    print("thread", os.path.exists(mark))
atexit.register(lambda: print("handler", os.path.exists(mark)))
threading.Thread(target=late).start()
"""


def test_end_of_all_work_is_marked_after_the_scripts_own_handlers(tmp_path: Path) -> None:
    """Only the interpreter's teardown follows the mark: a hang after the mark may be ended."""
    (tmp_path / "train.py").write_text(ENDING)
    (tmp_path / "left-3").write_text("0")
    assert run(tmp_path, "script", "train.py").stdout == "thread False\nhandler False\n"
    assert (tmp_path / "left-3").read_text() == "0"
