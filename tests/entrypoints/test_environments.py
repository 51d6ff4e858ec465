"""A job's environment on a host: interpreters, venvs from tiny wheels, folders in the form of a conda environment.

The tests cannot install conda: the folders hold only an interpreter and conda-meta, as conda leaves them.
"""

import fcntl
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import processes
from cloudtrain.entrypoints.environments import builds, condaenvs, interpreter, venvs
from cloudtrain.entrypoints.errors import Refused
from cloudtrain.entrypoints.host.verbs import prepare
from doubles.waiting import until

REQUIREMENTS = "--no-index\n--find-links wheels\ntiny==1.0\n"
PREPARE = """
import json, sys
from cloudtrain.entrypoints.host.verbs import prepare
print(json.dumps(prepare(spec=json.load(sys.stdin))))
"""


def wheel(folder: Path, version: str = "1.0", body: str = "") -> None:
    """Make a wheel of a package `tiny` of one module."""
    folder.mkdir(parents=True, exist_ok=True)
    about = f"tiny-{version}.dist-info"
    texts = {
        "tiny.py": f"VERSION = {version!r}\n{body}",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"tiny-{version}-py3-none-any.whl", "w") as archive:
        for name, text in texts.items():
            archive.writestr(zipfile.ZipInfo(name), text)  # dated 1980: always the same bytes


@pytest.fixture
def ask(tmp_path: Path) -> dict[str, Any]:
    """Return the requirements of a venv with the tiny package, from a wheel in the code's folder."""
    wheel(tmp_path / "code" / "wheels")
    return {
        "kind": "venv",
        "python": sys.executable,
        "requirements": REQUIREMENTS,
        "system_site_packages": False,
        "workdir": str(tmp_path / "work"),
        "code": str(tmp_path / "code"),
    }


def start(ask: dict[str, Any]) -> subprocess.Popen[str]:
    """Start a `prepare` in a process of its own."""
    child = subprocess.Popen([sys.executable, "-c", PREPARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    json.dump(ask, child.stdin)
    child.stdin.close()
    child.stdin = None
    return child


def run_in(made: dict[str, Any], program: str) -> str:
    """Return the output of a program in the environment."""
    done = subprocess.run([made["python"], "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@functools.cache
def own() -> interpreter.Interpreter:
    """Return the interpreter of the tests, examined once."""
    return interpreter.find(sys.executable)


def key_of(ask: dict[str, Any], **changes: Any) -> str:
    """Return the key of the requirements."""
    asked = {**ask, **changes}
    return venvs.key(asked["requirements"], Path(asked["code"]), own(), asked["system_site_packages"])


def test_none_finds_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's name is looked up on the path, and the result is absolute.

    The interpreter's link is not followed: the real interpreter would lack the venv's packages.
    """
    assert prepare(spec={"kind": "none", "python": sys.executable})["python"] == sys.executable
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    made = prepare(spec={"kind": "none", "python": Path(sys.executable).name})
    assert Path(made["python"]).is_absolute()
    assert made["detail"].startswith(f"Python {sys.version.split()[0]}")
    assert (made["environment"], made["container"], made["lock"]) == ({}, None, None)


def test_none_without_the_interpreter_is_refused() -> None:
    """The message names the key to set."""
    with pytest.raises(Refused, match=r"no interpreter `python9\.9` here; set `python`"):
        prepare(spec={"kind": "none", "python": "python9.9"})


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo '{}'", "does not work"),
        ("echo 'No module named encodings' >&2; exit 1", "does not work: No module named encodings"),
        ('exec {python} -c "import sys; sys.version_info = (3, 8, 1); exec(sys.argv[1])" "$3"', r"3\.8\.1 .*older"),
    ],
)
def test_none_with_a_broken_interpreter_is_refused(tmp_path: Path, script: str, words: str) -> None:
    """A broken interpreter, and one that is too old, are found before the job starts."""
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\n" + script.replace("{python}", sys.executable))
    broken.chmod(0o755)
    with pytest.raises(Refused, match=words):
        prepare(spec={"kind": "none", "python": str(broken)})


def test_key_ignores_comments_and_the_codes_place(ask: dict[str, Any], tmp_path: Path) -> None:
    """A different job with the same requirements has the same environment."""
    wheel(tmp_path / "other" / "wheels")
    noted = "# what we need\n--no-index\n--find-links   wheels\n\ntiny==1.0  # pinned\n"
    assert key_of(ask, requirements=noted, code=str(tmp_path / "other")) == key_of(ask)


@pytest.mark.parametrize("changes", [{"requirements": "tiny"}, {"system_site_packages": True}])
def test_key_differs_by_requirements_and_flags(ask: dict[str, Any], changes: dict[str, Any]) -> None:
    """A changed requirement or flag gives a different environment."""
    assert key_of(ask, **changes) != key_of(ask)


@pytest.mark.parametrize(
    "line",
    ["--find-links=wheels", "-f wheels", "-fwheels", "./lib", "lib/", "-r more.txt", "-cmore.txt", "tiny @ file:lib"],
)
def test_key_differs_by_local_content(ask: dict[str, Any], tmp_path: Path, line: str) -> None:
    """Local files in the requirements count by their content, in every notation."""
    code = tmp_path / "code"
    (code / "lib").mkdir()
    (code / "lib" / "setup.py").write_text("1")
    (code / "more.txt").write_text("-r deeper.txt\n-r more.txt\n")
    (code / "deeper.txt").write_text("tiny")
    before = key_of(ask, requirements=line)
    assert key_of(ask, requirements=line) == before
    wheel(code / "wheels", body="x = 1")
    (code / "lib" / "setup.py").write_text("2")
    (code / "deeper.txt").write_text("tiny>0")
    assert key_of(ask, requirements=line) != before


@pytest.mark.parametrize(
    "line",
    [
        "a===1",
        "a==1;b=='c'",
        "a == 1.*,!=1.2",
        "a==1 --hash=sha256:0",
        "torch",
        "a/b @ git+https://x/y",
        "git+https://x/a/b.git",
        "https://x/a.whl",
        "a>=1;b",
    ],
)
def test_key_takes_remote_requirements_as_text(ask: dict[str, Any], line: str) -> None:
    """Remote requirements need no local file."""
    assert venvs.key(line, Path(), own(), False)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-e ./lib", r"leave `-e` out, or write `setup: \[pip install -e \./lib\]`"),
        ("-e .", r"outlives its folder.*`setup: \[pip install -e \.\]`.*code's root.*PYTHONPATH: src"),
        ("-r gone.txt", "excluded"),
        ("./gone.whl", "excluded"),
        ("numpy @ file:///croot/numpy_1682520569166/work", "machine that wrote.*--format=freeze"),
        ("/home/me/a.whl", "machine that wrote"),
        *((line, "write `NAME==VERSION`") for line in ("numpy = 1.26", "a=1=py311_0", "a.b-c[d]==1.2=py3")),
    ],
)
def test_key_refuses_impossible_requirements(ask: dict[str, Any], line: str, words: str) -> None:
    """An editable install and a missing file are refused, with the line in the message."""
    with pytest.raises(Refused, match=words) as refused:
        key_of(ask, requirements=line)
    assert f"`{line}`" in str(refused.value)


@pytest.mark.slow
@pytest.mark.soak  # one builder, and a second job that finds the environment: tests/backends/test_dependencies.py
def test_venv_is_built_once_by_two_at_once(ask: dict[str, Any], tmp_path: Path) -> None:
    """Two processes get the same environment, which one of them built; a later call finds the environment.

    The base is a venv too, and its packages are visible, which `--system-site-packages` alone would not give.
    """
    asked = {**ask, "system_site_packages": True}
    made = [json.loads(child.communicate()[0]) for child in [start(asked), start(asked)]]
    assert made[0]["python"] == made[1]["python"]
    assert sorted("built in" in each["detail"] for each in made) == [False, True]
    assert run_in(made[0], "import tiny, pytest; print(pytest.__file__)") == pytest.__file__
    assert made[0]["environment"]["PATH"].split(":")[0] == str(Path(made[0]["python"]).parent)
    again = prepare(spec=asked)
    assert "found as built before" in again["detail"]
    log = Path(again["lock"]).with_suffix(".log").read_text()
    assert log.count(" -m venv ") == log.count(" pip install ") == 1
    assert [path.name for path in (tmp_path / "code").iterdir()] == ["wheels"]


@pytest.mark.soak  # two builders at once: the test above
@pytest.mark.slow
def test_venv_of_a_killed_builder_is_rebuilt(ask: dict[str, Any], tmp_path: Path) -> None:
    """The child processes of the builder die too; the next builder removes the leftovers and need not wait."""
    place = tmp_path / "work" / "env" / key_of(ask)
    child = start(ask)
    until(lambda: (place / "bin" / "python").exists())
    (place / "junk").touch()
    below = processes.descendants(child.pid)
    assert below
    child.send_signal(signal.SIGKILL)
    child.communicate()
    until(lambda: not any(processes.stamp(pid) for pid in below))
    made = prepare(spec=ask)
    assert run_in(made, "import tiny; print(tiny.VERSION)") == "1.0"
    assert not (place / "junk").exists()


def test_venv_that_takes_too_long_is_refused(ask: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit ends the child processes; the message names the full log."""
    before = set(processes.descendants(os.getpid()))  # helpers shared with further tests
    monkeypatch.setattr(builds, "LIMIT_S", 0.1)
    with pytest.raises(Refused, match=r"could not be made: not done after 0 s, .*raise the limit.* All of it: .*\.log"):
        prepare(spec=ask)
    until(lambda: set(processes.descendants(os.getpid())) <= before)  # a killed child of the child ends by itself


def test_venv_under_construction_for_too_long_is_refused(
    ask: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the process that builds, and the wait has a limit."""
    lock = tmp_path / "work" / "env" / f"{key_of(ask)}.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("process 7 on gpu3")
    held = builds.try_lock(lock, fcntl.LOCK_EX)
    assert held is not None
    monkeypatch.setattr(builds, "LIMIT_S", 0.2)
    with pytest.raises(Refused, match="process 7 on gpu3 has been working on it for over 0 s"):
        prepare(spec=ask)
    os.close(held)


@pytest.mark.slow
def test_venv_failure_has_pips_message_and_a_remedy(ask: dict[str, Any]) -> None:
    """The message names the missing distribution, with a remedy."""
    with pytest.raises(Refused) as refused:
        prepare(spec={**ask, "requirements": "--no-index\n--find-links wheels\nhuge==3"})
    assert "No matching distribution found for huge==3; check name and version" in str(refused.value)
    listed = f"ERROR: Could not find a==9 (from versions: {', '.join(map(str, range(999)))})\nERROR: No matching a==9"
    assert re.fullmatch(
        r"ERROR: Could not find a==9 .{150,250} \.\.\. .*998\) \| ERROR: No.*", builds.last_words(listed)
    )


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "free some space"),
        (
            "WARNING: Retrying: NewConnectionError\nERROR: No matching distribution found for a",
            "does not reach the index",
        ),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES do not match the hashes from", "correct the hashes"),
        ("The virtual environment was not created successfully because ensurepip is not\navailable.", "python3-venv"),
        ("    The user requested (constraint) torch==2.13.0+cpu\n", "the installed torch==2.13.0+cpu is not replaced"),
        ("fatal: unable to access 'https://x/y.git/': Could not resolve\nerror: subprocess-exited", "secrets: [TOKEN]"),
        ("fatal: Could not read from remote repository.\nConnection refused", "has no key for it"),
        ("ERROR: Cannot find command 'git' - do you have 'git' installed", "install git on the machine"),
        ("ERROR: Package 'a' requires a different Python: 3.11.2 not in '>=3.13'", "a version for that Python"),
        ("ERROR: Cannot install a and b because these package versions have conflicting dependencies.", "loosen"),
        (
            "  ModuleNotFoundError: No module named 'torch'\nerror: subprocess-exited",
            "--no-build-isolation",
        ),
        ("error: subprocess-exited-with-error\n× Building wheel for a did not run", "a version that has a wheel"),
        ("Segmentation fault", "see the log"),
    ],
)
def test_remedy_follows_from_pips_message(said: str, words: str) -> None:
    """The first cause counts: an unreachable index also gives "distribution not found"."""
    assert words in builds.cure(said, venvs.CURES, "see the log")


@pytest.mark.slow
def test_build_that_imports_torch_sees_the_interpreters(
    ask: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Build isolation hides no torch of a plain interpreter, the ranks see no link, and the interpreter stays whole."""
    base = plain_python(tmp_path / "base")
    site = Path(base.sites[0])
    for name in ("torch", "tiny"):
        (site / f"{name}-0.1.dist-info").mkdir()
        (site / f"{name}-0.1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        (site / f"{name}-0.1.dist-info" / "RECORD").write_text(f"{name}.py,,\n")
        (site / f"{name}.py").write_text("VERSION = '0.1'\n")
    flash = Path(ask["code"], "flash")
    flash.mkdir()
    (flash / "pyproject.toml").write_text(
        "[build-system]\nrequires = []\nbuild-backend = 'own'\nbackend-path = ['.']\n"
    )
    (flash / "own.py").write_text(
        "import shutil\n\nimport torch\n\n\ndef build_wheel(folder, *_):\n"
        "    return shutil.copy('../wheels/tiny-1.0-py3-none-any.whl', folder).split('/')[-1]\n"
    )
    asked = {"python": base.path, "holds_torch": True, "shows": True, "system_site_packages": True}
    made = prepare(spec={**ask, **asked, "requirements": "--no-index\ntorch\n./flash\n"})
    assert run_in(made, "import tiny; print(tiny.VERSION)") == "1.0"
    assert "cloudtrain-" not in run_in(made, "import sys; print(sys.path)")
    assert (site / "tiny.py").exists()
    shown = capfd.readouterr().out
    assert "Successfully installed tiny-1.0" in shown
    assert "already satisfied" not in shown
    (flash / "own.py").write_text("import absent\n")
    with pytest.raises(Refused, match=r"No module named 'absent'.*--no-build-isolation PACKAGE"):
        prepare(spec={**ask, **asked, "requirements": "--no-index\n./flash\n"})


def plain_python(prefix: Path) -> interpreter.Interpreter:
    """Return a Python that is no venv, with a folder of packages that holds pip alone."""
    version = "python{}.{}".format(*sys.version_info)
    (prefix / "bin").mkdir(parents=True)
    python = Path(shutil.copy(os.path.realpath(sys.executable), prefix / "bin" / version))
    library = Path(os.__file__).parent
    (prefix / "lib" / version).mkdir(parents=True)
    for each in library.iterdir():
        if each.name not in ("site-packages", "dist-packages"):
            (prefix / "lib" / version / each.name).symlink_to(each)
    site = Path(interpreter.probe(str(python)).sites[0])
    site.mkdir(parents=True, exist_ok=True)
    pip = Path(str(importlib.util.find_spec("pip").origin)).parent
    for each in [pip, *pip.parent.glob("pip-*.dist-info")]:
        (site / each.name).symlink_to(each)
    return interpreter.probe(str(python))


@pytest.mark.parametrize(("scratch", "words"), [(1, "set `env: {TMPDIR: FOLDER}`"), (9, "set `workdir`")])
def test_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scratch: int, words: str) -> None:
    """The cure names the disk with less room: where pip unpacks, or where the environment lies."""
    usage = shutil.disk_usage(tmp_path)
    (tmp_path / "log").write_text("ERROR: Could not install packages due to an OSError: [Errno 28] No space left")
    rooms = {tempfile.gettempdir(): scratch, str(tmp_path): 5}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=rooms[str(path)] << 30))
    with pytest.raises(Refused, match=re.escape(words)):
        venvs._check(1, tmp_path / "log", "the requirements could not be installed")


def test_prune_removes_only_unused_environments(tmp_path: Path) -> None:
    """An environment is removed 30 days after its last use, unless a job holds it."""
    folder = tmp_path / "env"
    folder.mkdir()
    old_s = time.time() - 31 * 86400
    for name, used_s in (("fresh", time.time()), ("held", old_s), ("old", old_s)):
        (folder / name).mkdir()
        for path in (folder / name / "used", folder / f"{name}.lock", folder / f"{name}.log"):
            path.touch()
            os.utime(path, (used_s, used_s))
    held = venvs.hold(str(folder / "held.lock"))
    venvs.prune(str(tmp_path))
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["fresh", "held"]
    assert not list(folder.glob("old*"))
    os.close(held)
    venvs.prune(str(tmp_path))
    assert sorted(path.name for path in folder.iterdir()) == ["fresh", "fresh.lock", "fresh.log"]
    assert (folder / "fresh" / "used").exists()


@pytest.fixture
def conda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a root in conda's form in the test's own home folder, with the environments `train` and `bare`."""
    for name in ("CONDA_EXE", "MAMBA_EXE", "MAMBA_ROOT_PREFIX", "CONDA_ROOT", "CONDA_ENVS_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(condaenvs, "SYSTEM_ROOTS", ())
    root = tmp_path / "miniforge3"
    (root / "condabin").mkdir(parents=True)
    for prefix in (root, root / "envs" / "train", root / "envs" / "bare"):
        (prefix / "conda-meta").mkdir(parents=True)
        (prefix / "bin").mkdir()
        if prefix.name != "bare":
            (prefix / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (root / "envs" / "not-one").mkdir()
    return root


def find(wanted: str) -> dict[str, Any]:
    """Return the result of `prepare` for a conda environment."""
    return prepare(spec={"kind": "conda", "conda": wanted})


def test_conda_by_name(conda: Path) -> None:
    """The interpreter and the variables equal those of an activation, with the variables set by conda."""
    prefix = conda / "envs" / "train"
    state = {"env_vars": {"HF_HOME": "/data/hf", "GONE": "***unset***"}}
    (prefix / "conda-meta" / "state").write_text(json.dumps(state))
    made = find("train")
    assert made["python"] == str(prefix / "bin" / "python")
    assert made["environment"].pop("PATH").startswith(f"{prefix}/bin:")
    conda = {"CONDA_PREFIX": str(prefix), "CONDA_DEFAULT_ENV": "train", "CONDA_SHLVL": "1"}
    assert made["environment"] == {**conda, "HF_HOME": "/data/hf"}


def test_conda_base_by_name_and_any_by_prefix(conda: Path) -> None:
    """`base` is the root; a prefix may lie anywhere, and begin with ~."""
    assert find("base")["environment"]["CONDA_DEFAULT_ENV"] == "base"
    assert find("~/miniforge3/envs/train")["python"] == find("train")["python"]


@pytest.mark.parametrize("is_listed", [True, False])
def test_conda_outside_all_roots(conda: Path, tmp_path: Path, is_listed: bool) -> None:
    """Conda's own list finds the environment; if neither list nor roots contain the name, `conda info` is asked."""
    elsewhere, tool = tmp_path / "data" / "lab", conda / "bin" / "conda"
    elsewhere.parent.mkdir()
    (conda / "envs" / "train").rename(elsewhere)
    if is_listed:
        (tmp_path / ".conda").mkdir()
        (tmp_path / ".conda" / "environments.txt").write_text(f"{elsewhere}\n{tmp_path}/removed\n")
    else:
        tool.write_text(f"#!/bin/sh\ntest \"$*\" = 'info --json' && echo '{json.dumps({'envs': [str(elsewhere)]})}'\n")
        tool.chmod(0o755)
    found = find("lab")
    assert (found["python"], found["environment"]["CONDA_DEFAULT_ENV"]) == (f"{elsewhere}/bin/python", str(elsewhere))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("trian", "did you mean `train`.*`base`.*`train`"),
        ("bare", "has no Python; `conda install"),
        ("~/miniforge3/envs/not-one", "no conda-meta"),
    ],
)
def test_conda_unknown_is_refused(conda: Path, wanted: str, words: str) -> None:
    """The message lists the existing environments."""
    with pytest.raises(Refused, match=words):
        find(wanted)


def test_ambiguous_conda_name_is_refused(conda: Path, tmp_path: Path) -> None:
    """Two environments of one name are listed by their prefixes."""
    (tmp_path / "miniconda3" / "envs" / "train" / "conda-meta").mkdir(parents=True)
    with pytest.raises(Refused, match=r"several conda environments `train`; give the prefix.*miniconda3.*miniforge3"):
        find("train")


def test_skipped_conda_scripts_are_reported(conda: Path) -> None:
    """Activation scripts need a shell, so the detail lists the skipped scripts."""
    scripts = conda / "envs" / "train" / "etc" / "conda" / "activate.d"
    scripts.mkdir(parents=True)
    (scripts / "cuda-nvcc.sh").touch()
    assert "not run, because no shell is used: activate.d/cuda-nvcc.sh" in find("train")["detail"]
