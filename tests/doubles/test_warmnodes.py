"""Warm nodes, compared with real interpreters."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import events

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_nodes")]

# The module's name makes the process warm.
TELL = """\
import json, os, pathlib, signal, sys, time
from cloudtrain.entrypoints import events
stop = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
environ = dict(pair.split("=", 1) for pair in pathlib.Path("/proc/self/environ").read_text().split(chr(0)) if pair)
print(json.dumps({"warm": "torch" in sys.modules, "argv": sys.argv, "cwd": os.getcwd(), "word": os.environ["WORD"],
    "file": events.parse.__code__.co_filename,
    "shown": environ["WORD"], "user": os.getuid(), "ignores": stop, "umask": os.umask(0)}), flush=True)
sys.argv[1] == "wait" and time.sleep(60)
sys.exit(75)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Return the command of a rank, with a module of the test in its place."""
    folder = tmp_path / "cloudtrain/entrypoints/agent"
    folder.mkdir(parents=True)
    (folder / "worker.py").write_text(TELL)
    shutil.copy(events.__file__, folder.parent)
    return [sys.executable, "-u", "-m", "cloudtrain.entrypoints.agent.worker"]


def run(command: list[str], folder: Path, *words: str, **more: str) -> tuple[int, dict[str, Any]]:
    """Run the command; return its exit code and its properties."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "WORD": "a b", **more}
    done = subprocess.run([*command, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def test_warm_rank_equals_a_cold_rank(command: list[str], tmp_path: Path) -> None:
    """Arguments, folder, environment in /proc, files and exit code are equal; only the warm rank has torch imported."""
    os.umask(0o027)
    warm, cold = run(command, tmp_path, "x"), run(command, tmp_path, "x", COLD_PYTHON="1")
    os.umask(0o022)
    assert (warm[1].pop("warm"), cold[1].pop("warm"), warm) == (True, False, cold)
    assert warm[1]["file"] == str(tmp_path / "cloudtrain/entrypoints/events.py")


def test_ignored_signals_are_taken_over(command: list[str], tmp_path: Path) -> None:
    """A process that `nohup` has started ignores SIGHUP, also as a fork."""
    told = run(["nohup", *command], tmp_path, "x")[1]
    assert (told["ignores"], told["warm"]) == (True, True)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_signal_ends_the_rank_and_its_proxy(command: list[str], tmp_path: Path, signum: int) -> None:
    """A signal to the pid known to the parent ends the rank; the parent sees the signal."""
    env = {"PATH": os.environ["PATH"], "WORD": str(tmp_path)}
    with subprocess.Popen([*command, "wait"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert json.loads(process.stdout.readline())["warm"]
        process.send_signal(signum)
        assert process.wait(10) == -signum
        assert process.stdout.read() == ""  # the rank has ended, too: its output is closed
