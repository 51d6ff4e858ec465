"""Boot in a container on the user's own host: command lines, and real podman where podman is installed and runs."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.entrypoints import atomic_json, processes
from cloudtrain.entrypoints.agent import starting
from cloudtrain.entrypoints.environments import container_init, dockerrun, images
from cloudtrain.entrypoints.environments.dockerrun import Container, Start
from cloudtrain.entrypoints.errors import Refused
from cloudtrain.entrypoints.host import verbs
from cloudtrain.entrypoints.host.verbs import prepare
from cloudtrain.launcher.config.schema import JobConfig
from cloudtrain.launcher.models import deployment
from cloudtrain.launcher.planning import bundle
from doubles.modelfolders import write_traced
from doubles.waiting import until

DIGEST = "sha256:" + "0123456789abcdef" * 4
DOCKER = Container("/usr/bin/docker", "docker", f"registry/train@{DIGEST}", "/opt/py/bin/python", "/w/home")
PODMAN = replace(DOCKER, client="/usr/bin/podman", kind="podman")
START = Start("digits-abcde", 1, 0, 2, "/w/jobs/digits-abcde/attempt-1/node-0")
LEFT_OUT = {"test", "site-packages", "__pycache__", "idlelib", "ensurepip", "tkinter", "lib2to3"}
LIBRARIES = "/usr/lib/x86_64-linux-gnu"  # torch needs libraries that the small image lacks
LIFELINE = [sys.executable, "-u", "-m", "cloudtrain.entrypoints.environments.container_init"]


def argv_of(container: Container = DOCKER, start: Start = START, names: Sequence[str] = (), **values: str) -> list[str]:
    """Return the command line of a program `-V`."""
    return dockerrun.container_argv(container, start, names, values, ["-V"])


def under_init(program: str) -> subprocess.Popen[bytes]:
    """Start a program under `container_init`, and wait for the program's first line."""
    child = subprocess.Popen([*LIFELINE, sys.executable, "-uc", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    dockerrun.hand(child.stdin, {})
    child.stdout.readline()
    return child


@pytest.mark.parametrize("image", [f"train@{DIGEST}", f"localhost:5000/a/b@{DIGEST}", f"ghcr.io/a/b:2.8@{DIGEST}"])
def test_digest_names_an_image(image: str) -> None:
    """A tag next to the digest does not matter."""
    assert images.digest_fault(image) is None


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("pytorch/pytorch:2.8", r"by a tag.*RepoDigests 0}}' pytorch/pytorch:2\.8`"),
        ("a b", r"RepoDigests 0}}' IMAGE`"),
        (f"train@{DIGEST[:-1]}", "whole digest"),
        ("", "no image is named"),
        (None, "no image is named"),
    ],
)
def test_image_without_digest_is_a_fault_with_a_remedy(image: str | None, words: str) -> None:
    """The remedy is a command that the user can paste."""
    assert re.search(words, images.digest_fault(image) or "")


def test_argv_of_docker() -> None:
    """The whole command line is correct: name, mounts, GPUs, user and program."""
    start = replace(START, mounts=(("/data", True), ("/w/jobs/digits-abcde/output", False)), gpus=("GPU-1", "GPU-2"))
    argv = argv_of(DOCKER, start, ["TOKEN", "A"], HOME="/w/home")
    begin = ["/usr/bin/docker", "run", "--rm", "--interactive", "--name=ct-digits-abcde-1-0-2", "--network=host"]
    assert argv[:6] == begin
    assert [argv[i + 1] for i, word in enumerate(argv) if word == "--mount"] == [
        "type=bind,source=/data,target=/data,readonly",
        "type=bind,source=/w/home,target=/w/home",
        f"type=bind,source={START.folder},target={START.folder}",
        "type=bind,source=/w/jobs/digits-abcde/output,target=/w/jobs/digits-abcde/output",
    ]
    assert argv[argv.index("--gpus") + 1] == '"device=GPU-1,GPU-2"'
    assert f"--user={os.geteuid()}:{os.getegid()}" in argv
    ends = ["--env=HOME=/w/home", "--env=A", "--env=TOKEN", "--entrypoint=/opt/py/bin/python", DOCKER.image, "-V"]
    assert argv[-6:] == ends


@pytest.mark.parametrize(
    ("container", "has", "has_not"),
    [
        (
            PODMAN,
            {"--device=nvidia.com/gpu=GPU-1", "--stop-timeout=0", "--pids-limit=-1"},
            {"--userns=keep-id", "--gpus"},
        ),
        (replace(PODMAN, is_rootless=True), {"--userns=keep-id", f"--user={os.geteuid()}:{os.getegid()}"}, {"--gpus"}),
        (replace(DOCKER, is_rootless=True), {"--user=0:0", "--gpus"}, {"--ulimit=memlock=-1:-1", "--userns=keep-id"}),
        (replace(DOCKER, is_remapped=True), {"--userns=host", "--ulimit=memlock=-1:-1"}, set()),
        (DOCKER, {"--ulimit=memlock=-1:-1", '"device=GPU-1"'}, {"--userns=host", "--pids-limit=-1"}),
    ],
)
def test_argv_differs_by_client_and_user(container: Container, has: set[str], has_not: set[str]) -> None:
    """Each client has its own options for users, GPUs and limits."""
    argv = set(argv_of(container, replace(START, gpus=("GPU-1",))))
    assert has <= argv
    assert not has_not & argv


def test_argv_shows_each_folder_once() -> None:
    """A folder inside a mounted parent is not mounted again, unless the folder must be writable."""
    inside = (("/w", True), ("/w/", False), ("/data", True), ("/data/a", True), ("/data/out,1", False))
    argv = argv_of(DOCKER, replace(START, mounts=inside))
    assert [argv[i + 1] for i, word in enumerate(argv) if word == "--mount"] == [
        "type=bind,source=/data,target=/data,readonly",
        'type=bind,"source=/data/out,1","target=/data/out,1"',
        "type=bind,source=/w,target=/w",
    ]


def test_command_shows_no_value_in_the_line() -> None:
    """Values travel in the client's environment, except for variables that the client itself would obey."""
    job = {"LR": "0.1", "PATH": "/opt/bin", "DOCKER_HOST": "tcp://x", "DOCKER_PASSWORD": "hunter2"}
    argv, environ = dockerrun.command(DOCKER, START, job, {"DOCKER_PASSWORD": "hunter2", "TOKEN": "t0p"}, ["-V"])
    line = " ".join(argv)
    assert "--env=LR --entrypoint" in line
    assert {"--env=PATH=/opt/bin", "--env=DOCKER_HOST=tcp://x", "--env=HOME=/w/home"} <= set(argv)
    assert not re.search("hunter2|DOCKER_PASSWORD|t0p|TOKEN|0\\.1", line)
    assert (environ["LR"], environ["PATH"]) == ("0.1", os.environ["PATH"])
    assert not {"TOKEN", "DOCKER_PASSWORD"} & set(environ)
    assert "DOCKER_HOST" not in environ or environ["DOCKER_HOST"] == os.environ["DOCKER_HOST"]
    assert argv[-3:] == ["cloudtrain.entrypoints.environments.container_init", DOCKER.python, "-V"]


def test_inherited_variables_do_not_describe_the_host() -> None:
    """The host's PATH and libraries do not enter the image."""
    host = {"PATH": "/bin", "LD_LIBRARY_PATH": "/x", "https_proxy": "p", "NCCL_DEBUG": "INFO"}
    host["CLOUDTRAIN_RESERVE"] = "/r"
    assert set(dockerrun.inherited(host)) == {"https_proxy", "NCCL_DEBUG", "CLOUDTRAIN_RESERVE"}


@pytest.mark.parametrize(("code", "means"), [(0, 0), (70, 70), (75, 75), (143, 143), (137, -9), (139, -11), (125, 125)])
def test_boot_code_separates_kills_from_exits(code: int, means: int) -> None:
    """A shell's codes for signals become negative; 143 is boot's own code."""
    assert dockerrun.boot_code(code) == means


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("permission denied while trying to connect to the Docker daemon socket", "usermod -aG docker"),
        ("Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?", "systemctl start docker"),
        ('could not select device driver "" with capabilities: [[gpu]]', "nvidia-container-toolkit"),
        ("Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=GPU-1", "nvidia-ctk cdi generate"),
        ('exec: "python9": executable file not found in $PATH', "set `python`"),
        ("reading manifest sha256:0 in quay.io/a/b: unauthorized: access denied", "log in to the registry"),
        (
            "pinging container registry x: Get https://x/v2/: dial tcp: lookup x: no such host",
            "does not reach the registry",
        ),
        ("what nobody knows", "try `docker run` by hand"),
    ],
)
def test_explain_gives_a_remedy(said: str, words: str) -> None:
    """Each usual complaint of the clients has its own remedy."""
    told = dockerrun.explain(DOCKER, said)
    assert told.startswith(said)
    assert words in told


def test_client_fault_only_where_the_client_failed(tmp_path: Path) -> None:
    """Boot's own exit codes are no fault of the client."""
    (tmp_path / "boot.log").write_text("Error: no space left on device\n")
    assert dockerrun.client_fault(DOCKER, 70, tmp_path / "boot.log") is None
    assert "free some space" in (dockerrun.client_fault(DOCKER, 125, tmp_path / "boot.log") or "")


def test_container_init_kills_its_program_when_its_input_ends() -> None:
    """A closed pipe means a dead agent: the program and its children in other sessions are killed."""
    program = (
        "import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True); print(1); time.sleep(600)"
    )
    child = under_init(program)
    below = processes.descendants(child.pid)
    assert len(below) == 2
    child.stdin.close()
    assert child.wait(30) == 137
    child.stdout.close()
    assert not any(processes.stamp(pid) for pid in below)


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); print(1); time.sleep(600)", 75),
        ("import time; print(1); time.sleep(600)", 143),
    ],
)
def test_container_init_passes_a_signal_on(program: str, code: int) -> None:
    """The exit code is the program's answer to SIGTERM."""
    child = under_init(program)
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == code
    child.communicate()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("podman", "no podman on this host; install it, or use docker, which is here"),
        ("docker", r"docker does not work on this host: .*systemctl start docker"),
    ],
)
def test_missing_client_or_daemon_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: str
) -> None:
    """An old `docker info` prints to stdout and exits with 0."""
    told = "echo null; test $1 = --version || echo 'Cannot connect to the Docker daemon' >&2"
    (tmp_path / "docker").write_text(f"#!/bin/sh\n{told}\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match=words):
        prepare(spec={"kind": kind, "image": DOCKER.image, "workdir": str(tmp_path)})


# The tests below use real podman. Its storage is in a folder of the test run; the image contains this Python.


def _libraries(paths: Sequence[str]) -> set[str]:
    told = subprocess.run(["ldd", *paths], capture_output=True, text=True).stdout
    return set(re.findall(r"(/\S+) \(", told))


def _image(tar: Path) -> None:
    """Write a root file system with the files of a shell and of this interpreter."""
    python, version = os.path.realpath(sys.executable), "python{}.{}".format(*sys.version_info)
    modules = [str(path) for path in Path(sysconfig.get_config_var("DESTSHARED")).glob("*.so")]

    def wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if LEFT_OUT & set(member.name.split("/")) or "/config-3" in member.name else member

    with tarfile.open(tar, "w") as archive:
        for name in ("tmp", "proc", "sys", "dev", "etc"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o777
            archive.addfile(folder)
        shell, pip = os.path.realpath("/bin/sh"), tar.with_name("pip")
        pip.write_text("#!/bin/sh\n")  # this machine's own packages take the place of those that pip would fetch
        pip.chmod(0o755)
        archive.add(pip, "usr/bin/pip")
        archive.add(shell, "bin/sh")
        for library in _libraries([python, shell, *modules]):
            archive.add(os.path.realpath(library), library.lstrip("/"))
        archive.add(python, "usr/bin/python3")
        archive.add(sysconfig.get_path("stdlib"), f"usr/lib/{version}", filter=wanted)


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the image's name by digest, for podman with a storage of its own. Skips if podman cannot run."""
    if not shutil.which("podman"):
        pytest.skip("podman is not installed (apt-get install podman)")
    base = tmp_path_factory.mktemp("podman")
    (base / "bin").mkdir()
    (base / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{base}/root"\nrunroot = "{base}/run"\n'
    )
    # Stay within the rights of a test container: no cgroups, no raised limits.
    (base / "containers.conf").write_text(
        '[containers]\ncgroups = "disabled"\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\n'
        '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "none"\n'
    )
    wrapper = base / "bin" / "podman"
    real = f'exec {shutil.which("podman")} "$@"'
    hybrid = Path("/sys/fs/cgroup/unified")
    if hybrid.is_dir() and os.geteuid() == 0:  # crun rejects mixed cgroups: hide them from the client
        real = f"exec unshare --mount sh -c 'umount {hybrid}; {real}' podman \"$@\""
    wrapper.write_text(f"#!/bin/sh\n{real}\n")
    wrapper.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{base}/bin:{os.environ['PATH']}")
        patch.setenv("CONTAINERS_CONF", f"{base}/containers.conf")
        patch.setenv("CONTAINERS_STORAGE_CONF", f"{base}/storage.conf")
        _image(base / "root.tar")
        imported = subprocess.run(
            ["podman", "import", "--quiet", f"{base}/root.tar", "localhost/ct-test:1"], capture_output=True, text=True
        )
        (base / "root.tar").unlink()
        digest = subprocess.run(
            ["podman", "images", "--format={{.Digest}}"], capture_output=True, text=True
        ).stdout.strip()
        image = f"localhost/ct-test@{digest}"
        tried = subprocess.run(
            ["podman", "run", "--rm", "--network=host", image, "python3", "-c", "print(1)"],
            capture_output=True,
            text=True,
        )
        if tried.stdout.strip() != "1":
            pytest.skip(f"podman does not run here: {(imported.stderr + tried.stderr).strip()[-300:]}")
        yield image
        subprocess.run(["podman", "system", "reset", "--force"], capture_output=True)


@pytest.fixture
def ask(podman: str, tmp_path: Path) -> dict[str, Any]:
    """Return the requirements of a job in the image."""
    return {"kind": "podman", "python": "python3", "image": podman, "workdir": str(tmp_path / "work")}


@pytest.fixture
def container(podman: str, tmp_path: Path) -> Container:
    """Return the image as `prepare` does, without the trial."""
    (tmp_path / "home").mkdir()
    return Container(shutil.which("podman") or "", "podman", podman, "/usr/bin/python3", str(tmp_path / "home"))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Start]:
    """Return a start in a node's folder with the runtime inside; containers left by a test are removed."""
    folder = tmp_path / "node"
    package = folder / "runtime" / "cloudtrain" / "entrypoints"
    (package / "environments").mkdir(parents=True)
    here = Path(processes.__file__).parent
    for name in ("environments/container_init.py", "processes.py"):
        shutil.copy(here / name, package / name)
    yield Start(f"test-{os.getpid()}", 1, 0, 1, str(folder))
    dockerrun.sweep(folder)


def begin(container: Container, start: Start, program: str, **secrets: str) -> subprocess.Popen[str]:
    """Start a program in the container, as an agent does, and wait for the first line."""
    dockerrun.note(container, start)
    folder = start.folder
    job = {"PYTHONPATH": f"{folder}/runtime", "CLOUDTRAIN_LOG_DIR": f"{folder}/log", **secrets}  # as an agent's
    argv, environ = dockerrun.command(container, start, job, secrets, ["-uc", program])
    child = subprocess.Popen(
        argv, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert isinstance(child.stdin, io.TextIOWrapper)
    dockerrun.hand(child.stdin.buffer, secrets)
    assert child.stdout.readline() == "here\n", child.communicate()[0]
    return child


def end(child: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the client's exit code and output."""
    code = child.wait(60)  # the input stays open until then
    told = child.stdout.read()  # not by communicate, which skips readline's buffer
    child.communicate()
    return code, told


def inside(mark: str) -> list[int]:
    """Return the pids of Python processes with the mark in their command line, without the client's."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"python3") and any(mark.encode() in word for word in words):
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
def test_prepare_tries_the_image(ask: dict[str, Any]) -> None:
    """`prepare` returns the interpreter inside and all fields for `dockerrun`; no files of the trial remain."""
    made = prepare(spec=ask)
    assert made["python"] == "/usr/bin/python3"
    assert Container(**made["container"]).image == ask["image"]
    assert "there already" in made["detail"]
    assert list((Path(ask["workdir"]) / "home").iterdir()) == []
    assert subprocess.run(["podman", "ps", "-aq"], capture_output=True, text=True).stdout == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"python": "python9"}, "cannot start python9 .*; set `python` to an interpreter that is in the image"),
        ({"image": f"localhost/absent@{DIGEST}"}, "cannot be pulled: .*"),
        ({"image": "localhost/ct-test:1"}, "names an image by a tag"),
    ],
)
def test_prepare_refuses_unusable_images(ask: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    """The fault is found before the job, in podman's own words with a remedy."""
    with pytest.raises(Refused, match=words):
        prepare(spec={**ask, **changes})


@pytest.mark.slow
def test_container_runs_as_its_user_with_secrets_unseen(container: Container, node: Start, tmp_path: Path) -> None:
    """Files belong to the user, values arrive whole, inputs are read-only, and `ps` shows no secret."""
    data = tmp_path / "data"
    data.mkdir()
    node = replace(node, mounts=((str(data), True),))
    program = f"""
import os, pathlib, sys
print("here")
sys.stdin.readline()
print(repr(os.environ["TOKEN"]), os.environ["HOME"], os.getcwd(), os.environ["PATH"])
pathlib.Path("made").touch()
try:
    pathlib.Path({str(data)!r}, "made").touch()
except OSError as error:
    print(error.strerror)
os._exit(70)
"""
    child = begin(container, node, program, TOKEN="two\nlines $x")
    code, told = end(child)
    first, second = told.splitlines()
    assert first.startswith(f"'two\\nlines $x' {container.home} {node.folder} /usr/local")
    assert (code, second) == (70, "Read-only file system")
    assert (Path(node.folder) / "made").stat().st_uid == os.geteuid()
    assert os.environ["PATH"] not in first


@pytest.mark.slow
def test_secrets_are_in_no_file_of_the_clients(container: Container, node: Start) -> None:
    """Neither podman's files nor `inspect` nor the client's environment hold secrets; the program has them whole."""
    secret = f"s3cr3t-{os.getpid()}-"
    program = "import os, sys; print('here'); print(len(os.environ['TOKEN'])); import time; time.sleep(600)"
    child = begin(container, node, program, TOKEN=secret + 100_000 * "x")  # more than a pipe holds
    assert child.stdout.readline() == f"{len(secret) + 100_000}\n"
    told = subprocess.run([container.client, "inspect", node.name], capture_output=True, text=True, check=True).stdout
    assert node.name in told
    assert secret not in told
    storage = Path(os.environ["CONTAINERS_STORAGE_CONF"]).parent
    files = [path for path in [*storage.rglob("*"), *Path(node.folder).rglob("*")] if path.is_file()]
    assert any(path.name == "config.json" for path in files)
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
    clients = [child.pid, *processes.descendants(child.pid)]
    assert not any(secret.encode() in Path(f"/proc/{pid}/environ").read_bytes() for pid in clients)
    assert dockerrun.remove(container, node.name) is None
    end(child)


@pytest.mark.slow
def test_script_runs_in_the_container(container: Container, node: Start) -> None:
    """A script runs with the job's variables, secrets and folder and returns its code; after the job, outside."""
    child = begin(container, node, "import time; print('here'); time.sleep(600)", TOKEN="s3cr3t")
    told = dockerrun.running(Path(node.folder))
    assert told[:2] == (container, node.name)
    argv = dockerrun.exec_argv(container, node.name, ["sh"], True)
    assert argv[1:] == ["exec", "--interactive", "--tty", node.name, "sh"]
    program = "import os, sys; print(sys.stdin.read(), os.environ['TOKEN'], os.getcwd(), os.getppid()); sys.exit(5)"
    path = verbs.script(root=node.folder, argv=[container.python, "-c", program])["path"]
    assert "s3cr3t" not in Path(path).read_text()
    done = subprocess.run(["sh", path], input="a b", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (5, f"a b s3cr3t {node.folder} 0\n"), done.stderr
    assert dockerrun.remove(container, node.name) is None
    end(child)
    assert dockerrun.running(Path(node.folder)) is None


def test_container_init_starts_nothing_without_the_secrets(tmp_path: Path) -> None:
    """If the agent dies before it has sent the secrets, no program starts without them."""
    made = tmp_path / "made"
    done = subprocess.run([*LIFELINE, "touch", str(made)], input=b'{"TOKEN": "t', timeout=60)
    assert (done.returncode, made.exists()) == (container_init.CUT, False)


@pytest.mark.slow
def test_container_answers_a_signal(container: Container, node: Start) -> None:
    """SIGTERM to the client reaches the program, and the program's exit code returns."""
    program = "import signal, os, time; signal.signal(15, lambda *_: os._exit(75)); print('here'); time.sleep(600)"
    child = begin(container, node, program)
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 75
    child.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["agent", "client"])
def test_container_ends_with_its_agent_and_its_client(container: Container, node: Start, how: str) -> None:
    """If the agent or the client dies, by SIGKILL too, no process remains, and a sweep removes the container."""
    mark = f"mark_{how}_{os.getpid()}"
    child = begin(container, node, f"import time; print('here'); {mark} = 1; time.sleep(600)")
    assert inside(mark)
    if how == "agent":
        child.stdin.close()  # as the kernel does for a killed agent
        child.stdin = None
        assert dockerrun.boot_code(child.wait(30)) == -9
    else:
        child.send_signal(signal.SIGKILL)
    child.communicate()
    until(lambda: not inside(mark), 30)
    assert dockerrun.sweep(Path(node.folder)) is None
    assert subprocess.run(["podman", "ps", "-aq"], capture_output=True, text=True).stdout == ""


@pytest.mark.slow
def test_remove_kills_a_container_that_ignores_signals(container: Container, node: Start) -> None:
    """`remove` works at once; a second removal, or of an unused name, is no error."""
    mark = f"mark_deaf_{os.getpid()}"
    child = begin(
        container,
        node,
        f"import signal, time; signal.signal(15, 1 and signal.SIG_IGN); {mark} = 1; print('here'); time.sleep(600)",
    )
    began_s = time.monotonic()
    assert dockerrun.remove(container, node.name) is None
    assert time.monotonic() - began_s < 8  # podman's own patience is 10 s
    assert not inside(mark)
    assert dockerrun.boot_code(end(child)[0]) == -9
    assert dockerrun.remove(container, node.name, "ct-never") is None


@pytest.mark.slow
def test_sweep_removes_containers_of_a_dead_agent(container: Container, node: Start) -> None:
    """The sweep removes every start of the node by its labels, and no container of other nodes."""
    mark = f"mark_swept_{os.getpid()}"
    child = begin(container, node, f"import time; {mark} = 1; print('here'); time.sleep(600)")
    other = replace(node, node=1, folder=str(Path(node.folder)))
    neighbour = begin(container, other, "import time; print('here'); time.sleep(600)")
    dockerrun.note(container, node)
    assert dockerrun.sweep(Path(node.folder)) is None
    assert not inside(mark)
    assert neighbour.poll() is None
    assert dockerrun.remove(container, other.name) is None
    end(child)
    end(neighbour)


def test_sweep_without_a_container_does_nothing(tmp_path: Path) -> None:
    """Most jobs have no container; a missing client is reported."""
    assert dockerrun.sweep(tmp_path) is None
    atomic_json.write_json(
        tmp_path / "container.json", {"container": asdict(DOCKER) | {"client": "/gone/docker"}, "labels": {}}
    )
    assert "/gone/docker gives no answer" in (dockerrun.sweep(tmp_path) or "")


@pytest.fixture
def own_umask() -> Iterator[None]:
    """Restore the umask of this process: `start` tightens the umask, and a later test's hosts would be unreadable."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.mark.usefixtures("own_umask")
@pytest.mark.slow
def test_agent_runs_a_job_in_the_container(container: Container, tmp_path: Path) -> None:
    """Ranks, log, secrets and end equal a job without a container; mounted site-packages of the host bring torch."""
    code, root = tmp_path / "code", tmp_path / "jobs" / "node-0"
    code.mkdir()
    root.mkdir(parents=True)
    (code / "train.py").write_text(
        "import os\nprint('in', os.environ['container'], len(os.environ['TOKEN']), os.environ['RANK'], flush=True)\n"
    )
    packed = bundle.pack(code, (), 1_000_000, tmp_path / "bundles")
    site = sysconfig.get_path("purelib")
    folders = {f"CLOUDTRAIN_{name}_DIR": str(tmp_path / name.lower()) for name in ("CHECKPOINT", "OUTPUT")}
    for folder in folders.values():
        Path(folder).mkdir()
    job = {"nodes": 1, "min_nodes": 1, "node_counts": [1], "nproc_per_node": 1, "max_restarts": 0, "timeout_s": 60}
    job |= {"job": "t", "attempt": 1, "run": {"kind": "script", "target": "train.py", "args": []}}
    spec = {
        "job": "t",
        "attempt": 1,
        "node": 0,
        "address": "127.0.0.1",
        "root": str(root),
        "token": "x",
        "bundle": str(packed.path),
        "sha256": packed.sha256,
        "python": container.python,
        "workdir": str(tmp_path),
        "max_restarts": 0,
        "environment": {**folders, "PYTHONPATH": site, "container": "podman"},
        "secrets": {"TOKEN": "s3cr3t"},
        "max_duration_s": 120,
        "limit_reason": "time_limit",
        "deadline_s": 100,
        "grace_s": 10,
        "colocated": 1,
        "container": asdict(container),
        "mounts": [[site, True], [LIBRARIES, True], *([folder, False] for folder in folders.values())],
        "gpus": [],
        "spec": job,
    }
    told = starting.start({"folder": str(root), "nodes": [spec]})
    assert told["started"]
    until(lambda: (root / "exit.json").exists(), 120)
    ended = atomic_json.read_json(root / "exit.json")
    assert ended["state"] == "succeeded", (ended, (root / "log" / "boot.log").read_text())
    assert (root / "log" / "rank-0.log").read_text() == "in podman 6 0\n"
    assert "s3cr3t" not in "".join(path.read_text(errors="replace") for path in root.glob("*.json"))


def traced(place: Path) -> dict[str, Any]:
    """Write a model folder with a traced model that doubles its input, in place of an export."""
    import torch

    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    write_traced(place, "double", Double().eval(), lambda samples: {"x": torch.ones(samples, 2)})
    return {"files": []}


ASK = """
import sys, time, urllib.error, urllib.request
base, ready, *path = sys.argv[1:]
for _ in range(600):
    try:
        with urllib.request.urlopen(base + ready) as answer:
            break
    except OSError:
        time.sleep(0.2)
data = b'{"instances": [[1.0, 2.5]]}'
print(urllib.request.urlopen(base + path[0], data).read().decode())
"""


@pytest.mark.slow
@pytest.mark.soak  # builds an image
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("vendor", "ready", "path", "options"),
    [
        ("sagemaker", "/ping", "/invocations", []),
        ("vertex", "/v2/health/ready", "/predict", ["AIP_HTTP_PORT=8080", "AIP_PREDICT_ROUTE=/predict"]),
        ("azureml", "/v2/health/ready", "/score", ["AZUREML_MODEL_DIR=/mnt/azureml/double"]),
    ],
)
def test_image_of_an_export_serves_the_model(
    podman: str, tmp_path: Path, vendor: str, ready: str, path: str, options: list[str]
) -> None:
    """The Dockerfile of `export --for` is built as written, from another base, and answers on the platform's paths."""
    place, name = tmp_path / "out", f"localhost/served-{vendor}:1"
    deployment.write(vendor, JobConfig(name="double"), "double", None, place, traced)
    built = ["podman", "build", f"--from={podman}", "--network=none", "--layers=false", f"--tag={name}", str(place)]
    done = subprocess.run(built, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    site = sysconfig.get_path("purelib")
    words = [f"--volume={site}:/site:ro", f"--volume={LIBRARIES}:{LIBRARIES}:ro", "--env=PYTHONPATH=/srv:/site"]
    if vendor == "azureml":
        words += [f"--volume={place}/model:/mnt/azureml/double/model:ro"]
    words += [f"--env={each}" for each in options]
    run = ["podman", "run", "--rm", f"--name=served-{vendor}", "--network=none", *words, name, "serve"]
    asked = ["podman", "exec", f"served-{vendor}", "python3", "-c", ASK, "http://127.0.0.1:8080", ready, path]
    answers: list[str] = []

    def answered() -> bool:
        answers.append(subprocess.run(asked, capture_output=True, text=True).stdout)
        return bool(answers[-1]) or server.poll() is not None

    with (tmp_path / "log").open("w") as log, subprocess.Popen(run, stderr=log) as server:
        try:
            until(answered, 120)
        finally:
            subprocess.run(["podman", "rm", "--force", "--time=5", f"served-{vendor}"], capture_output=True)
    assert answers[-1], (tmp_path / "log").read_text()
    assert json.loads(answers[-1]) == {"predictions": [[2.0, 5.0]]}
