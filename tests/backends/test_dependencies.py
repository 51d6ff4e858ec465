"""A job's `requirements` and `setup` on every backend: real pip, wheels made here, torch kept as installed."""

import json
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import wholejobs

from cloudtrain.launcher import config as configs
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.planning.prepare import prepare
from doubles.waiting import until

SETTINGS = {name: text for name, text in wholejobs.SETTINGS.items() if name != "processes"}
IMAGE = f"image: a/b@sha256:{'0' * 64}\n"
CLOUDS = ("sagemaker", "azureml", "vertex")
ONE_NODE = {"azureml", "local"}  # in the test of reuse; two that build at once: tests/entrypoints/test_environments.py
REQUIREMENTS = "--no-index\n--find-links wheels\ntiny==1.0\nlikes-torch\n"
# Each rank prints its environment.
SCRIPT = """
import json, os, sys
import tiny, torch

try:
    import own
except ImportError:
    own = None
told = {"tiny": tiny.VERSION, "torch": torch.__file__, "prefix": sys.prefix, "own": own is not None}
told |= {"venv": os.environ["VIRTUAL_ENV"], "made": os.environ["MADE"]}
print(json.dumps(told), flush=True)
"""


def wheel(folder: Path, name: str = "tiny", version: str = "1.0", requires: str = "") -> None:
    """Make a wheel of one module."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    about, needs = f"{module}-{version}.dist-info", f"Requires-Dist: {requires}\n" if requires else ""
    texts = {
        f"{module}.py": f"VERSION = {version!r}\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in texts.items():
            archive.writestr(zipfile.ZipInfo(path), text)  # dated 1980: always the same bytes


@pytest.fixture(params=sorted(SETTINGS))
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the backend's name; its stand-in runs, and the command finds the stand-in."""
    name: str = request.param
    if name in wholejobs.STAND_INS:
        for key, value in request.getfixturevalue(wholejobs.STAND_INS[name]).environ.items():
            monkeypatch.setenv(key, value)
    return name


@pytest.fixture
def job(project: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that writes a project with wheels and the given config."""

    def write(settings: str, requirements: str = REQUIREMENTS, text: str = SCRIPT) -> Path:
        alone = "distributed: {allow_alone: true}\n"  # a rank only prints its packages, and ends
        folder = project(alone + settings, script="train.py", text=text)
        for name, version, requires in (
            *(("tiny", "1.0", ""), ("own", "1.0", ""), ("likes-torch", "1.0", "torch>=2")),
            *(("hates-torch", "1.0", "torch==1.0"), ("torch", "1.0", ""), ("torch", "99.0", "")),
        ):
            wheel(folder / "wheels", name, version, requires)
        (folder / "requirements.txt").write_text(requirements)
        return folder

    return write


def lines(cli: Any, job: str = "last") -> list[str]:
    """Return the texts of a job's lines."""
    return [json.loads(line)["text"] for line in cli("logs", job, "--json").stdout.splitlines()]


def told(texts: list[str]) -> list[dict[str, Any]]:
    """Return the data that each rank printed."""
    return [json.loads(text) for text in texts if text.startswith('{"tiny"')]


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",  # all build by the same code; a cloud's store: tests/entrypoints/test_environments.py
    ["local", *(pytest.param(name, marks=pytest.mark.soak) for name in sorted(SETTINGS.keys() - {"local"}))],
    indirect=True,
)
def test_packages_are_installed_and_reused_by_the_second_job(cli: Any, job: Any, backend: str) -> None:
    """Built once, then found on the host or in the cloud's store; `setup` affects this job alone.

    torch stays the image's, although a package asks for torch and the index has a newer version.
    """
    nodes = 1 if backend in ONE_NODE else 2
    folder = job(
        SETTINGS[backend].replace("instances: 2", f"instances: {nodes}")
        + "requirements: requirements.txt\nenv: {MADE: 'a b; $HOME'}\n"
        + 'setup: [pip install --no-index --find-links wheels own, \'test "$MADE" = "a b; \\$HOME" && pwd > where\']\n'
    )
    done = cli.ok("submit", "-y", cwd=folder, timeout_s=280)
    assert "requirements.txt: installed on each node" in done.stderr
    first = told(lines(cli))
    assert [(each["tiny"], each["own"], each["made"]) for each in first] == [("1.0", True, "a b; $HOME")] * nodes
    assert {each["prefix"] for each in first} == {each["venv"] for each in first}
    assert all("/venv" in each["prefix"] and each["prefix"] not in each["torch"] for each in first)
    config = (folder / "cloudtrain.yaml").read_text()
    (folder / "cloudtrain.yaml").write_text(config[: config.index("setup:")])
    assert cli("submit", "-y", cwd=folder, timeout_s=280).code == 0
    texts = lines(cli)
    assert [(each["tiny"], each["own"]) for each in told(texts)] == [("1.0", False)] * nodes
    how = [text for text in texts if text.startswith("setup: venv ")]
    assert len(how) == nodes
    assert all(("fetched from the store" if backend in CLOUDS else "found as built before") in text for text in how)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", pytest.param("vertex", marks=pytest.mark.soak)], indirect=True)
def test_packages_that_cannot_be_installed_end_the_job(cli: Any, job: Any, backend: str) -> None:
    """No rank starts; the error is one of configuration, with pip's words, a remedy, and the last lines."""
    folder = job(SETTINGS[backend] + "requirements: requirements.txt\n", f"{REQUIREMENTS}hates-torch\n")
    assert cli("submit", "-y", cwd=folder, timeout_s=280).code == 1
    status = cli("status", "last", "--json").json
    assert (status["state"], status["error"]["kind"], status["restarts"]) == ("failed", "config", 0)
    message = status["error"]["message"]
    assert "the requirements could not be installed: ERROR: Cannot install" in message
    texts = lines(cli)
    assert any("The user requested (constraint) torch" in text for text in texts)
    assert any(re.search(r"the installed torch\S+ is not replaced: loosen that requirement", text) for text in texts)
    if backend == "local":
        assert any("ResolutionImpossible" in line for line in status["error"]["lines"])
        said = cli("status", "last").stdout
        assert re.search(r"the installed torch\S+ is not replaced", said)
        assert "being installed" not in said


@pytest.mark.slow
def test_setup_that_fails_ends_the_job_with_the_commands_output(cli: Any, job: Any) -> None:
    """The commands after the failing one are not run."""
    folder = job(
        SETTINGS["local"] + "setup: ['true', 'echo sorry; echo no such thing >&2; exit 3', 'echo third']\n", text="1"
    )
    assert cli("submit", "-y", cwd=folder).code == 1
    message = cli("status", "last", "--json").json["error"]["message"]
    assert "setup command 2 of 3 ended with code 3: echo sorry" in message
    assert "no such thing" in message
    assert "third" not in lines(cli)


@pytest.mark.slow
def test_stop_during_preparation_ends_at_once(cli: Any, job: Any, tmp_path: Path) -> None:
    """The commands die with their children, no rank starts, and the job is stopped by its user."""
    folder = job(SETTINGS["local"] + f"setup: ['touch {tmp_path}/begun; sleep 300 & sleep 300']\n", text="1")
    assert cli("submit", "-y", "-d", cwd=folder).code == 0
    until((tmp_path / "begun").exists)
    status = cli("status", "last", "--json").json
    assert (status["state"], status["detail"]) == ("pending", "its packages are being installed")
    assert cli("stop", "last", "-y").code == 0
    status = cli("status", "last", "--json").json
    assert (status["state"], status["reason"]) == ("stopped", "user")
    assert not list(cli.home.glob("local/*/attempt-1/node-*/log/rank-*.log"))


@pytest.mark.slow
@pytest.mark.soak  # test_rehearse.py misses a file in the same way
@pytest.mark.parametrize("backend", ["local", "vertex"])
def test_rehearsal_misses_a_package_that_the_requirements_lack(cli: Any, job: Any, backend: str) -> None:
    """On `local` a rehearsal sees this machine's packages, elsewhere only the requirements. torch is on both."""
    folder = job(
        SETTINGS[backend] + "requirements: requirements.txt\nenv: {MADE: x}\n", text=f"import pydantic\n{SCRIPT}"
    )
    done = cli("rehearse", "--steps", "1", "--nodes", "1", "--json", cwd=folder, timeout_s=280)
    if backend == "local":
        assert done.code == 0, done.stdout + done.stderr
        return
    assert done.code == 1
    assert done.json["error"]["type"] == "ModuleNotFoundError"
    assert done.json["hint"] == "the environment holds torch and requirements.txt alone: add the package there"
    (folder / "train.py").write_text(SCRIPT)
    begun = {path.name: path.stat().st_ino for path in cli.home.glob("rehearsed/env/*")}
    cli.ok("rehearse", "--steps", "1", "--nodes", "1", "--json", cwd=folder, timeout_s=280)
    assert {path.name: path.stat().st_ino for path in cli.home.glob("rehearsed/env/*")} == begun != {}


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ("backend: local\nrequirements: gone.txt\n", "requirements", "no file `gone.txt`"),
        ("backend: local\nrequirements: editable.txt\n", "requirements", "outlives its folder"),
        ("backend: local\nrequirements: train.py\n", "requirements", "no header"),
        (
            f"{IMAGE}backend: ssh\nrequirements: requirements.txt\nssh: {{hosts: [h], environment: docker}}\n",
            "requirements",
            "does not go with `ssh.environment: docker`",
        ),
        (
            f"backend: ssh\nsetup: ['true']\nssh: {{hosts: [h], environment: podman}}\nimage: a/b@sha256:{'0' * 64}\n",
            "setup",
            "does not go with `ssh.environment: podman`",
        ),
        (
            "requirements: a.txt\nbackend: ssh\nssh: {hosts: [h], environment: venv, requirements: a.txt}\n",
            "ssh.requirements",
            "exclude each other",
        ),
        (
            SETTINGS["sagemaker"].replace("{role", "{bucket: b-b, region: us-east-1, distribution: smdistributed, role")
            + "requirements: requirements.txt\n",
            "requirements",
            "the image's toolkit starts the script by itself",
        ),
    ],
)
def test_packages_that_cannot_be_installed_are_refused(
    job: Any, tmp_path: Path, settings: str, key: str, words: str
) -> None:
    """`validate` and the dry run report the fault at its key, before what follows from it."""
    folder = job(settings)
    (folder / "editable.txt").write_text("-e .\n")
    (folder / "a.txt").write_text("tiny\n")
    with pytest.raises(ConfigError, match=words) as refused:
        prepare(configs.load(folder / "cloudtrain.yaml"), folder / "cloudtrain.yaml", tmp_path / "cache", dry=True)
    assert [fault.key for fault in refused.value.faults][:1] == [key]


@pytest.mark.parametrize("backend", sorted(SETTINGS))
def test_request_contains_installs_only_if_configured(
    job: Any, tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clouds' requests contain the store of environments next to the job's own place."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    settings = os.path.expandvars(SETTINGS[backend]).replace("{role", "{bucket: b-b, role")
    monkeypatch.setenv("SSH_CONFIG", "/dev/null")
    monkeypatch.setenv("SSH_PYTHON", "python3")
    texts = []
    for more in ("", "requirements: requirements.txt\nsetup: ['true']\n"):
        folder = job(settings + more)
        file = folder / "cloudtrain.yaml"
        request = prepare(configs.load(file), file, tmp_path / "cache", dry=True).request
        texts.append("\n".join(request.files.values()))
    assert [bool(re.search(r"\bcommands\"?:", text)) for text in texts] == [False, True]
    stores = [bool(re.search(r"/environments$|/environments\"", text, re.M)) for text in texts]
    assert stores == [False, backend in CLOUDS]
