"""`doctor` checks this installation, and asks several backends at the same time."""

import os
import sqlite3
import sys
import threading
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.launcher.backend import Check
from cloudtrain.launcher.backend_table import BUILT_IN
from cloudtrain.launcher.commands import doctor as checks
from cloudtrain.launcher.errors import CredentialError
from cloudtrain.launcher.job import Job, State
from cloudtrain.launcher.text.extras import install

# No metadata server is queried.
GOOGLE = {"GOOGLE_CLOUD_PROJECT": "a-project", "GOOGLE_CLOUD_LOCATION": "us-central1", "NO_GCE_CHECK": "true"}
FILE = """\
name: x
script: train.py
ssh: {hosts: [h0.invalid]}
sagemaker: {role: no-arn}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a project whose file configures two backends beside the local backend."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "cloudtrain.yaml").write_text(FILE)
    return tmp_path


def named(checks: list[dict[str, str]] | list[Check], name: str) -> Any:
    """Return the check with the name from the list."""
    return next(check for check in checks if (check["name"] if isinstance(check, dict) else check.name) == name)


def test_doctor_checks_every_configured_backend(cli: Any, folder: Path) -> None:
    """Each group has a heading, the installation first; each failed check has a cure; the summary is on stderr."""
    done = cli("doctor", "--json", cwd=folder, env={"AWS_REGION": "eu-west-1"})
    assert list(done.json) == ["cloudtrain", "local", "ssh", "sagemaker"]
    assert done.code == 1
    failed = [check for checks in done.json.values() for check in checks if check["verdict"] == "fail"]
    assert failed
    assert all(check["cure"] for check in failed), failed
    done = cli("doctor", cwd=folder)
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["cloudtrain", "local", "ssh", "sagemaker"]
    count = sum(line.startswith("  ok ") or line[2:6] in ("warn", "fail") for line in lines)
    assert done.stderr.splitlines()[-1].startswith(f"{count} checks: ")
    assert (" failed" in done.stderr, "fails" in done.stderr) == (True, False)


@pytest.mark.parametrize("given", [["all"], ["--backend", "all"], ["all", "--backend", "all"]])
def test_all_asks_every_backend(cli: Any, folder: Path, given: list[str], tmp_path: Path) -> None:
    """`all` works as an argument and as an option."""
    environ = GOOGLE | {"CLOUDSDK_CONFIG": str(tmp_path), "HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}
    done = cli("doctor", *given, "--json", cwd=folder, env=environ)
    assert list(done.json) == ["cloudtrain", *BUILT_IN]


@pytest.mark.parametrize(("python", "words"), [("/no/python", "there is no interpreter"), ("VENV", "not in ")])
def test_local_looks_at_the_jobs_interpreter(cli: Any, folder: Path, tmp_path: Path, python: str, words: str) -> None:
    """`local.python` counts, not the interpreter that runs cloudtrain: a job would be refused, or fail."""
    if python == "VENV":
        venv.create(tmp_path / "env", symlinks=True)
        python = str(tmp_path / "env/bin/python")
    (folder / "cloudtrain.yaml").write_text(f"{FILE}local: {{python: {python}}}\n")
    done = cli("doctor", "local", "--json", cwd=folder)
    check = named(done.json["local"], "torch")
    assert (check["verdict"], words in check["found"], "local.python" in check["cure"]) == ("fail", True, True)


def test_missing_torch_beside_cloudtrain_has_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `local.python` the cure is the extra of this installation."""
    venv.create(tmp_path / "env", symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env/bin/python"))
    assert LocalBackend().doctor(None)[1].cure == install("local")


def test_option_names_the_backend(cli: Any, folder: Path) -> None:
    """`--backend local` is `local`, without a second backend and this installation; two names are refused."""
    for words in (["local"], ["--backend", "local"]):
        assert list(cli("doctor", *words, "--json", cwd=folder).json) == ["local"]
    done = cli("doctor", "local", "--backend", "ssh", cwd=folder)
    assert (done.code, "two backends" in done.stderr) == (2, True)


@pytest.mark.parametrize("command", [["doctor"], ["list"], ["status", "last"], ["budget", "show"]])
def test_relative_home_folder_is_refused(cli: Any, folder: Path, command: list[str]) -> None:
    """A relative CLOUDTRAIN_HOME would be a new home folder in each directory; the hint is the absolute path."""
    done = cli(*command, cwd=folder, env={"CLOUDTRAIN_HOME": "state"})
    assert (done.code != 0, "is a relative path" in done.stdout + done.stderr) == (True, True)
    assert f"export CLOUDTRAIN_HOME={folder}/state" in done.stdout + done.stderr
    assert not (folder / "state").exists()


def test_doctor_checks_this_machine(cli: Any, tmp_path: Path) -> None:
    """Without a file only the local backend is checked; a finding repeats no verdict; an invalid file is refused."""
    done = cli("doctor")
    assert not cli.home.exists()
    assert (done.code, "cloudtrain doctor ssh" in done.stderr) == (0, True), done.stdout
    assert [line for line in done.stdout.splitlines() if not line.startswith(" ")] == ["cloudtrain", "local"]
    done = cli("doctor", "vertex", env=GOOGLE | {"CLOUDSDK_CONFIG": str(tmp_path), "HOME": str(tmp_path)})
    assert "fail  credentials: no valid Google credentials" in done.stdout
    assert done.stderr.splitlines()[-1] == "2 checks: 1 failed, 1 warning"
    done = cli("doctor", "vertex", env=GOOGLE | {"GOOGLE_CLOUD_PROJECT": "", "HOME": str(tmp_path)})
    assert done.stderr.splitlines()[-1] == "1 check: 1 failed"
    (tmp_path / "cloudtrain.yaml").write_text(FILE + "instanecs: 2\n")
    done = cli("doctor", cwd=tmp_path)
    assert (done.code, "instanecs" in done.stderr) == (3, True)


def test_slow_backend_delays_no_backend() -> None:
    """All backends are asked at once; a timeout is a failed check, and the answers in time are unchanged."""
    both, never = threading.Barrier(2, timeout=30), threading.Event()

    def together(name: str) -> Callable[[], list[Check]]:
        def ask() -> list[Check]:
            both.wait()  # passes only if both backends are asked at the same time
            return [Check(name, "ok", "")]

        return ask

    def stuck() -> list[Check]:
        never.wait(60)
        return []

    found = dict(checks.answers({"slow": stuck, "a": together("a"), "b": together("b")}, limit_s=1.0))
    never.set()
    told = [(name, checks[0].name, checks[0].verdict) for name, checks in found.items()]
    assert told == [("slow", "answer", "fail"), ("a", "a", "ok"), ("b", "b", "ok")]


def test_backend_that_raises_is_a_failed_check() -> None:
    """An error of cloudtrain keeps its hint, a foreign error is a fault to report, and further backends answer."""

    def refused() -> list[Check]:
        raise CredentialError("no", hint="log in")

    def broken() -> list[Check]:
        raise KeyError("x")

    found = dict(checks.answers({"a": refused, "b": broken, "c": lambda: [Check("c", "ok", "")]}))
    told = [(found[name][0].verdict, found[name][0].cure[:9]) for name in "abc"]
    assert told == [("fail", "log in"), ("fail", "report it"), ("ok", "")]


def test_registry_check_counts_the_jobs(seed: Callable[..., Job]) -> None:
    """The finding has the number of jobs."""
    seed("a", State("succeeded"))
    check = named(checks.of_this_installation(), "registry")
    assert (check.verdict, check.found.split(",")[0]) == ("ok", "1 job")


@pytest.mark.parametrize("harm", ["no database", "a torn page", "locked"])
def test_damaged_or_locked_registry_fails(seed: Callable[..., Job], home: Path, harm: str) -> None:
    """The cure names the file."""
    for number in range(40):
        seed(f"job-{number}", State("succeeded"))
    path, holder = home / "registry.sqlite", None
    sqlite3.connect(path).execute("PRAGMA wal_checkpoint(TRUNCATE)").connection.close()
    if harm == "no database":
        path.write_bytes(b"nothing" * 9999)
    elif harm == "a torn page":
        data = path.read_bytes()
        path.write_bytes(data[:8192] + os.urandom(len(data) - 8192))
    else:
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("PRAGMA locking_mode = EXCLUSIVE")
        holder.execute("BEGIN EXCLUSIVE")
    check = named(checks.of_this_installation(), "registry")
    if holder is not None:
        holder.close()
    assert (check.verdict, str(path) in check.cure) == ("fail", True), check


def test_missing_tools_and_homes_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path) -> None:
    """Not every job needs `git` or `ssh`; a home folder whose path lies inside a file fails."""
    monkeypatch.setenv("PATH", str(tmp_path))
    found = checks.of_this_installation()
    assert [named(found, name).verdict for name in ("git", "ssh")] == ["warn", "warn"]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / "file" / "home"))
    check = named(checks.of_this_installation(), "home")
    assert (check.verdict, "CLOUDTRAIN_HOME" in check.cure) == ("fail", True)


def test_installed_completion_is_detected(cli: Any, tmp_path: Path) -> None:
    """An installed file, or a line of the shell's start-up file, counts."""
    own = {"SHELL": "/bin/bash", "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data")}
    check = named(cli("doctor", "--json", env=own).json["cloudtrain"], "completion")
    assert (check["found"], check["cure"]) == ("not set up for bash", "cloudtrain completion bash --install")
    cli("completion", "--install", env=own)
    assert named(cli("doctor", "--json", env=own).json["cloudtrain"], "completion")["found"] == "set up for bash"
