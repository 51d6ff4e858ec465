"""Two hundred strings with a meaning for some shell, ssh or format: no string is executed, and all arrive unchanged.

The canary: an executed string leaves a file `pwned-...`, on a host or on this machine.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloudtrain.backends.channel.hosts import Host
from cloudtrain.backends.ssh import check, jobs
from cloudtrain.launcher.backend import load
from cloudtrain.launcher.errors import CloudtrainError
from doubles.sshhosts.cluster import Cluster
from doubles.sshhosts.fleet import end, fleet, forget

CANARY = f"pwned-{os.getpid()}"
TOUCH = f"touch /tmp/{CANARY}"
# Forms that a shell might run, with @ for a command; each form alone and between words.
_FORMS = [
    *(
        *("$(@)", "`@`", "; @ ;", "| @", "&& @", "|| @", "& @ &", "\n@\n", "\r\n@\r\n", "';@;'"),
        *('";@;"', "'\"'\"';@;'\"'\"'"),
    ),
    *("\\';@;\\'", '\\";@;\\"', "$'\\x27;@;'", "${IFS};@", "(@)", "{ @; }", "<(@)", "$((@))", "${x:-$(@)}", "a=$(@)"),
    *("!@", "!!;@", "#\n@", "(eval @)", "begin; @; end", "$[@]", "%((@))", "{{ @ }}", "{% @ %}", "\\\n@", "\t@\t"),
    *("__import__('os').system('@')", "-oProxyCommand=@", "--rsh=@"),
]
_TEXT = r"""
    \ \\ \n \0 ' " '' "" '" ` `` $ $$ $? $0 $@ $* $# $HOME ${HOME} $( ${ $(( %HOME% % %% %h %p %r %C %n %L %u %d %i %T
    %s%n {} {0} {x} {{}} {{7*7}} {%x%} ! !! !x !$ a!b ~ ~/ ~root ~+ * ? [a-z] [!x] /* ** a*b {a,b} {1..9} - -- -n -e -c
    --help -F/dev/null -rf @ # & && | ; ;; < > <<EOF <<<x >&2 2>&1 ( ) () { } [ ] [[ ^ = a=b : ::cloudtrain:: , . ..
    ../.. / // null true 1e3 é ß 日本語 🔥
"""
_BLANKS = ["", " ", "  two  ", "\t", "\n", "\r", "\n\n", "# x", "a=b c=d", "::ct {}"]
_LETTERS = ["e\u0301", "\u202eabc", "\u200b", "\ufeff", "\u2028", "\x1b[31m", "\x07", "\x7f", "\x80", "\x01"]
_LONG = ["x" * 20_000, "é" * 9_000, f"{'y' * 9_000}$({TOUCH})", "'" * 5_000, "\n" * 3_000]
_RUN = [form.replace("@", TOUCH) for form in _FORMS]
STRINGS = [*_TEXT.split(), *_BLANKS, *_LETTERS, *_LONG, *_RUN, *(f"a {form} b" for form in _RUN)][:200]
SHELLS = ("sh", "bash", "dash", "zsh", "csh", "tcsh", "fish")


@pytest.fixture(autouse=True)
def nothing_is_executed(tmp_path: Path) -> Iterator[None]:
    """Check after every test that no string ran as a command on this machine."""
    yield
    found = [path for place in (tmp_path, Path("/tmp"), Path.cwd()) for path in place.glob(f"{CANARY}*")]
    assert found == []


@pytest.fixture
def pair(ssh_pair: Cluster, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Return two hosts that this process reaches; check at the end that no string ran as a command on the hosts."""
    ssh_pair.apply(monkeypatch)
    forget()
    yield ssh_pair
    end(home)
    for host in ssh_pair.hosts:
        assert [path for path in host.folder.glob(f"*/**/{CANARY}*") if path.is_file()] == []


def host(cluster: Cluster, **more: Any) -> Host:
    """Return the first host, as a config would name the host."""
    return Host(**{"name": "h0", "ssh_config": str(cluster.ssh_config), "python": sys.executable, **more})


@pytest.fixture
def login(pair: Cluster) -> Iterator[Callable[[str], Host]]:
    """Return a function that gives alice a login shell, and returns the host for alice."""
    users = pair.root / "etc/passwd"
    before = users.read_text()

    def with_shell(shell: str) -> Host:
        path = shutil.which(shell)
        if path is None:
            pytest.skip(f"{shell} is not installed here")
        lines = [
            f"{line.rpartition(':')[0]}:{path}" if line.startswith("alice:") else line for line in before.splitlines()
        ]
        users.write_text("\n".join(lines) + "\n")
        return host(pair, user="alice", workdir=f"~/of {shell}")

    yield with_shell
    users.write_text(before)


def reference(target: Host, root: str) -> dict[str, Any]:
    """Return a job's reference with the fields for machines and folders."""
    node = {"host": target.dump(), "root": root, "output": f"{root}/output", "checkpoints": f"{root}/ck"}
    return {"nodes": [node], "nproc_per_node": 1, "can_shrink": False}


ECHO = "import sys; print([word.encode('utf-8', 'surrogateescape').hex() for word in sys.argv[1:]])"


def test_corpus_is_two_hundred_different_strings() -> None:
    """No string occurs twice, and no string was cut off."""
    assert len(STRINGS) == len(set(STRINGS)) == 200
    assert sum(TOUCH in string for string in STRINGS) >= 25


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_exec_passes_every_string_for_any_login_shell(login: Callable[[str], Host], shell: str) -> None:
    """Two hundred arguments in one command, with some invalid text; the workdir contains a blank."""
    target = login(shell)
    words = [*STRINGS, *(os.fsdecode(raw) for raw in (b"\xff", b"\xc3\x28", b"a\x80b'"))]
    fleet().call(target, "calls.clock", {})
    command = jobs.shell(
        fleet(), reference(target, fleet().channel(target).about["workdir"]), 0, [sys.executable, "-c", ECHO, *words]
    )
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.replace("'", '"')) == [os.fsencode(word).hex() for word in words]
    left = fleet().call(target, "files.tree", {"folder": "/tmp"})["files"]
    assert [name for name, _ in left if name.startswith(("cloudtrain-", CANARY))] == []


def test_exec_ends_with_the_commands_code(pair: Cluster) -> None:
    """A missing command gives 127 and a message."""
    root = reference(host(pair), "/tmp")
    for argv, code, said in (["sh", "-c", "exit 7"], 7, ""), (["no such; thing"], 127, "no such; thing: No such file"):
        done = subprocess.run(
            jobs.shell(fleet(), root, 0, argv), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def _name(string: str) -> str:
    """Return the string as a valid name of a file, with at most 200 bytes."""
    raw = string.replace("/", "_").encode()[:200].decode(errors="ignore")
    return raw if raw not in ("", ".", "..") else f"{raw}x"


@pytest.mark.slow
def test_workdir_and_interpreter_may_be_any_path(pair: Cluster) -> None:
    """Control characters are refused earlier; all further paths are used unchanged."""
    names = sorted({_name(string) for string in STRINGS if check._WORD.fullmatch(_name(string))})
    assert len(names) > 140
    for begin in range(0, len(names), 10):
        where = "/opt/" + "/".join(names[begin : begin + 10])
        there = pair.hosts[0].folder / where[1:]
        there.mkdir(parents=True)
        (there / names[begin]).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (there / names[begin]).chmod(0o755)
        target = host(pair, workdir=f"{where}/work", python=f"{where}/{names[begin]}")
        assert fleet().call(target, "calls.clock", {})["now_s"] > 0
        assert fleet().channel(target).about["workdir"] == f"{where}/work"
        assert (there / "work/runtime").is_dir()


def _faults(**more: Any) -> list[str]:
    """Return the keys that the offline check refuses for a request whose host has these fields."""
    body = {
        "hosts": [Host(**{"name": "h0", **more}).dump()],
        "spec": {"nodes": 1},
        "ports": [20000, 20100],
        "runs_in": {"kind": "none", "requirements": None, "conda": None, "image": None},
        "checkpoint_dir": more.get("checkpoint"),
        "inputs": {},
        "outputs": {},
    }
    return [str(fault.key) for fault in check.faults(body)]


@pytest.mark.slow
def test_host_and_user_names_are_refused_or_harmless(pair: Cluster) -> None:
    """Names that pass the check go to ssh; ssh itself stays harmless even without the check."""
    worst = [*(string for string in STRINGS if TOUCH in string and "\n" not in string), "-oProxyCommand=touch x", "%h"]
    passed = [string for string in STRINGS if string and not _faults(name=string)]
    assert not [string for string in passed if TOUCH in string or string.startswith("-")]
    users = [string for string in STRINGS if string and not _faults(user=string)]
    assert not [string for string in users if TOUCH in string or string.startswith("-")]
    targets = [host(pair, name=string) for string in dict.fromkeys([*passed, *worst])]
    targets += [host(pair, user=string) for string in dict.fromkeys([*users, *worst[:6]])]
    for target in targets:
        with pytest.raises(CloudtrainError):
            fleet().run(fleet().masters.connected(target))


def test_paths_with_control_characters_are_refused() -> None:
    """A newline in the interpreter's path would be read as the next line of our own greeting."""
    for string in (string for string in STRINGS if any(ord(letter) < 32 for letter in string)):
        assert _faults(python=f"/x{string}") == ["ssh.hosts[0].python"]
        assert _faults(workdir=f"/x{string}") == ["ssh.hosts[0].workdir"]


@pytest.mark.slow
def test_artifacts_of_a_hostile_job_stay_in_their_folder(pair: Cluster, tmp_path: Path) -> None:
    """Names arrive unchanged, even with invalid text; links are followed, and no file leaves the folder."""
    output = pair.hosts[0].home / "job/output"
    names = {_name(string) for string in STRINGS} | {os.fsdecode(b"\xff\xfe.bin"), os.fsdecode(b"\xc3\x28"), "n" * 240}
    for number, name in enumerate(sorted(names)):
        folder = output / (f"d{number}" if number % 2 else ".")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(f"{number}".encode())
    (output / "link").symlink_to("/etc/hostname")
    (output / "dead").symlink_to("/nowhere")
    found = load("ssh").artifacts(reference(host(pair), "/home/root/job"), tmp_path / "got")
    mine = {os.fsencode(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file()}
    got = {os.fsencode(path.relative_to(tmp_path / "got")): path.read_bytes() for path in found}
    assert got == {**mine, b"link": b"h0\n"}
    assert {path.name for path in tmp_path.iterdir()} <= {"got", "home"}


SCRIPT = """\
import json, os, sys
print(json.dumps({
    "argv": [os.fsencode(word).hex() for word in sys.argv[1:]],
    "env": [os.fsencode(os.environ[f"S{n}"]).hex() for n in range(200)],
    "secret": os.fsencode(os.environ["RAW"]).hex(),
    "places": [os.environ[f"CLOUDTRAIN_{name}"] for name in ("CHECKPOINT_DIR", "INPUT_SET")],
    "code": sorted(os.fsencode(name).hex() for name in os.listdir("names")),
}), flush=True)
"""
CONFIG = """\
name: hostile
backend: ssh
script: "ru'n; $(id).py"
resources: {instances: 1}
secrets: [RAW]
"""


@pytest.mark.slow
def test_whole_job_of_hostile_strings_works(cli: Any, ssh_pair: Cluster, tmp_path: Path) -> None:
    """Arguments, variables, a secret with invalid text, names in the code folder, and every path of the config."""
    folder = tmp_path / "project"
    (folder / "names").mkdir(parents=True)
    (folder / "ru'n; $(id).py").write_text(SCRIPT)
    names = {_name(string) for string in STRINGS}
    for name in names:
        (folder / "names" / name).write_text("x")
    quoted = f'it\'s "a" $(touch {CANARY}) `touch {CANARY}` %h %% ! ~'
    python = ssh_pair.hosts[0].folder / "opt" / quoted
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    more = {
        "args": STRINGS,
        "env": {f"S{number}": string for number, string in enumerate(STRINGS)},
        "checkpoint": {"uri": f"/home/root/{quoted}/ck"},
        "inputs": {"set": f"/home/root/{quoted}/set"},
        "outputs": {"model": f"/home/root/{quoted}/model"},
        "ssh": {
            "hosts": [{"host": "h0", "workdir": f"/home/root/{quoted}", "python": f"/opt/{quoted}"}],
            "ssh_config": str(ssh_pair.ssh_config),
        },
    }
    (folder / "cloudtrain.yaml").write_text(CONFIG + yaml.safe_dump(more).replace("${", "$${"))
    raw = b"s\xff'\";`id`$(id)\xc3"
    environ = {**ssh_pair.environ, "RAW": os.fsdecode(raw)}
    done = cli.ok("submit", "-y", "--json", cwd=folder, env=environ, timeout_s=200)
    lines = [json.loads(line)["text"] for line in done.stdout.splitlines() if '"text"' in line]
    told = json.loads(next(line for line in lines if line.startswith("{")))
    expected = [string.encode().hex() for string in STRINGS]
    assert (told["argv"], told["env"], told["secret"]) == (expected, expected, raw.hex())
    job = json.loads(cli("status", "last", "--json", env=environ).stdout)["job"]
    assert told["places"] == [f"/home/root/{quoted}/ck/{job}", f"/home/root/{quoted}/set"]
    assert told["code"] == sorted(name.encode().hex() for name in names)
    assert (ssh_pair.hosts[0].home / quoted / "model").is_dir()
    assert list(ssh_pair.hosts[0].folder.glob(f"*/**/{CANARY}*")) == []
    cli.ok("artifacts", "last", "-o", tmp_path / "out", env=environ)


NUL = 'args: ["a\\0b"]\n', 'env: {X: "a\\0b"}\n', 'ssh: {hosts: [h0], workdir: "/a\\0b"}\n'


@pytest.mark.parametrize("more", NUL)
def test_nul_is_refused_before_the_submit(cli: Any, project: Callable[..., Path], more: str) -> None:
    """No argument, variable or path of a process can contain NUL: exit code 3, with the place in the file."""
    settings = "backend: ssh\n" + ("ssh: {hosts: [h0]}\n" if "ssh:" not in more else "")
    done = cli("validate", cwd=project(settings + more))
    assert (done.code, "Traceback" in done.stderr) == (3, False), done.stderr


class Watch(threading.Thread):
    """Searches every command line of this machine and its simulated hosts for a secret, until stopped."""

    def __init__(self, secret: str) -> None:
        super().__init__(daemon=True)
        self.secret, self.seen, self.looks, self.is_over = secret.encode(), set[str](), 0, threading.Event()

    def run(self) -> None:
        """Search."""
        while not self.is_over.wait(0.03):
            self.looks += 1
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    line = path.read_bytes()
                    if self.secret in line:
                        self.seen.add(line.decode(errors="replace"))


SECRET_JOB = """\
name: secret
backend: ssh
script: train.py
distributed: {{allow_alone: true}}
resources: {{instances: 2}}
secrets: [TOKEN]
ssh: {{hosts: [h0, h1], ssh_config: "{config}", python: "{python}"{more}}}
"""
SECRET_SCRIPT = """\
import hashlib, os, time
print("digest", hashlib.sha256(os.environ["TOKEN"].encode()).hexdigest(), flush=True)
time.sleep(1)
raise SystemExit(int(os.environ["RANK"]))
"""
VENV = ", environment: venv, requirements: requirements.txt, system_site_packages: true"


@pytest.mark.slow
@pytest.mark.parametrize("more", [pytest.param("", id="none"), pytest.param(VENV, id="venv", marks=pytest.mark.soak)])
def test_secret_is_in_no_list_of_processes_and_in_no_file(
    cli: Any, ssh_pair: Cluster, project: Callable[..., Path], home: Path, more: str
) -> None:
    """The secret is in no file of either end, during the send, the run and after the failure; the ranks have it."""
    secret = "sesame-" + hashlib.sha256(more.encode()).hexdigest()[:24]
    folder = project(text=SECRET_SCRIPT, script="train.py")
    (folder / "requirements.txt").write_text("# none\n")
    config = SECRET_JOB.format(config=ssh_pair.ssh_config, python=sys.executable, more=more)
    (folder / "cloudtrain.yaml").write_text(config)
    environ = {**ssh_pair.environ, "TOKEN": secret}
    watch = Watch(secret)
    watch.start()
    done = cli("submit", "-y", cwd=folder, env=environ, timeout_s=200)
    shown = [cli("status", "last", *extra).stdout for extra in ([], ["--json"])]
    watch.is_over.set()
    watch.join()
    assert done.code == 1, done.stderr
    assert done.stdout.count(hashlib.sha256(secret.encode()).hexdigest()) >= 2  # the error has a third
    assert (watch.seen, watch.looks > 20) == (set(), True)
    assert secret not in "".join([done.stdout, done.stderr, *shown])
    places = [home, folder, fleet().masters.folder]
    places += [host.folder / disk for host in ssh_pair.hosts for disk in ("home", "tmp", "var", "opt", "data")]
    places += [host.path(path) for host in ssh_pair.hosts for path in ("/run", "/dev/shm")]
    files = [path for place in places for path in place.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 50
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
