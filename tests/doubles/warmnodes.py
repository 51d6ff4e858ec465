"""Warm nodes: torchrun and the ranks of every job start with torch imported, on this machine and in all containers.

Importing torch takes 1.2 s of processor time, for torchrun and again for each rank: most of the cost of a test's job.
Compiling the node's own copy of the trainer takes 0.2 s more: a fork gets the compiled code from the server.
Exports, estimates of memory, and the workers of the strategy async start warm, too. A server imports torch once. A
node's interpreter (`warmproxy`) asks the server for a fork, which joins the interpreter's namespaces, user, folder,
limits and files, and shows the interpreter's environment in /proc. The interpreter stays as a proxy. Without root, or
in a container whose properties the fork cannot take over, the real interpreter goes on.

Two proofs stay with real interpreters: jobs with the variable COLD_PYTHON, and environments with a torch of their own.
"""

import _imp
import contextlib
import ctypes
import fcntl
import importlib.machinery
import inspect
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from cloudtrain.entrypoints import processes
from doubles import namespaces as ns
from doubles import warmproxy, warmpython

# Third-party modules only: each node has its own copy of cloudtrain.
TORCH = ("numpy", "torch.distributed.run", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint")
ENTRYPOINTS = Path(processes.__file__).parent
SITE = Path(sysconfig.get_path("purelib"))
SOCKET, HOOK, PROXY = SITE / "warm.socket", SITE / "zzz_warm.pth", SITE / "warmproxy.py"
# The modules that import torch.
NODES = ("agent.elastic", "agent.worker")
FURTHER = ("trainer.parameter_server.worker", "trainer.memory", "export", "export.reference", "export.check")
MODULES = {f"cloudtrain.entrypoints.{name}" for name in (*NODES, *FURTHER)}
HOOK_TEXT = f"import sys; {MODULES}.isdisjoint(sys.orig_argv[2:4]) or __import__('warmproxy').main()\n"
POLL_S = 0.05
MOST_FILES = 256
PATH_BYTES = 107  # of a socket, unix(7)
PR_SET_DUMPABLE = 4
ENVIRON = slice(47, 49)  # the fields env_start and env_end of /proc/PID/stat, counted from the state on
ENVIRON_BYTES = 100_000
NAMESPACES = {"mnt": ns.CLONE_NEWNS, "uts": ns.CLONE_NEWUTS, "ipc": ns.CLONE_NEWIPC, "net": ns.CLONE_NEWNET}


@contextlib.contextmanager
def server() -> Iterator[None]:
    """Have warm nodes in this environment; the first process of several starts the server, the last ends it."""
    # Only root may join namespaces and take over users. A socket's path has a limit.
    if os.geteuid() != 0 or len(os.fsencode(SOCKET)) > PATH_BYTES:
        yield
        return
    with _alone():
        session = _session() or _started()
    with session:
        yield


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    with (SITE / "warm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _session() -> socket.socket | None:
    session = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        session.connect(str(SOCKET))
        session.send(b"session")
        if session.recv(99) == b"kept":
            return session
    except OSError:
        pass
    session.close()
    return None


def _started() -> socket.socket:
    env = {name: value for name, value in os.environ.items() if not name.startswith("CLOUDTRAIN_")}
    env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # read when the libraries are loaded
    env |= {"PYTHONPATH": str(Path(__file__).parents[1]), "SPACE": "x" * ENVIRON_BYTES}
    begun = subprocess.Popen(
        [sys.executable, __file__], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    )
    assert begun.stdout is not None
    with begun.stdout:
        assert begun.stdout.readline() == b"ready\n", "the server of warm nodes did not start"
    begun.returncode = 0  # ends by itself after the last session
    session = _session()
    assert session is not None
    return session


def _serve(listener: socket.socket) -> tuple[dict[str, Any], list[str]] | None:
    """Serve until the last session has ended; return the request in a forked process, None at the end."""
    sessions: set[socket.socket] = set()
    while True:
        ready = select.select([listener, *sessions], [], [], POLL_S if sessions else 60)[0]
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        for session in sessions & set(ready):
            session.close()
            sessions.remove(session)
        if not sessions and listener not in ready:
            return None
        if listener not in ready:
            continue
        connection, _ = listener.accept()
        data, files, _, _ = socket.recv_fds(connection, warmproxy.MESSAGE_BYTES, 3)
        if data == b"session":
            connection.send(b"kept")
            sessions.add(connection)
            continue
        if data and os.fork() == 0:
            for each in (listener, *sessions):
                each.close()
            return _guard(connection, files, json.loads(data))
        connection.close()
        for file in files:
            os.close(file)


def _guard(connection: socket.socket, files: list[int], request: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fork the process, pass signals on to it, and tell its end; return the request in the process."""
    asker = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little")
    with contextlib.suppress(OSError):
        if not _can_be_equal(asker, request):
            os._exit(0)
        places = {name: os.open(f"/proc/{asker}/ns/{name}", os.O_RDONLY) for name in NAMESPACES}
        root = os.open(f"/proc/{asker}/root", os.O_PATH)
        ns.setns(os.open(f"/proc/{asker}/ns/pid_for_children", os.O_RDONLY), ns.CLONE_NEWPID)
        processes.become_subreaper()
        ready, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(Exception):
                ns.prctl(ns.PR_SET_PDEATHSIG, signal.SIGKILL)
                _take_over(request, places, root, files)
                os.write(told, b"1")
                os.closerange(3, MOST_FILES)
                return request, request["path"]
            os._exit(1)
        os.close(told)
        if os.read(ready, 1) == b"1":
            connection.send(b"warm")
            _watch(connection, pid)
    os._exit(0)


def _can_be_equal(asker: int, request: dict[str, Any]) -> bool:
    """Return whether a fork can take over all properties of the interpreter."""
    same = all(_link(asker, f"ns/{name}") == _link("self", f"ns/{name}") for name in ("user", "cgroup"))
    caps = [_status(who)["CapEff"] for who in (asker, "self")]
    same = same and (request["prefix"], request["torch"]) == (sys.prefix, sys.modules["torch"].__file__)
    return same and (request["ids"][0] != 0 or caps[0] == caps[1])


def _link(who: int | str, name: str) -> str:
    return str(Path(f"/proc/{who}/{name}").readlink())


def _status(who: int | str) -> dict[str, str]:
    return dict(line.split(":", 1) for line in Path(f"/proc/{who}/status").read_text().splitlines())


def _take_over(request: dict[str, Any], places: dict[str, int], root: int, files: list[int]) -> None:
    """Take over the interpreter's namespaces, root folder, files, environment, limits and user."""
    os.setsid()
    _show_environment(request["env"])
    for name, place in places.items():
        ns.setns(place, NAMESPACES[name])
        os.close(place)
    os.fchdir(root)
    os.chroot(".")
    os.close(root)
    os.chdir(request["cwd"])
    for number, file in enumerate(files):
        os.dup2(file, number)
    for name, limit in request["limits"].items():
        resource.setrlimit(getattr(resource, name), tuple(limit))
    os.umask(request["umask"])
    user, group, groups = request["ids"]
    os.setgroups(groups)
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    ns.prctl(PR_SET_DUMPABLE, 1)


def _show_environment(env: dict[str, str]) -> None:
    """Have /proc/PID/environ show the environment: agents and tests find a job's processes by its variables.

    The kernel shows the memory where the environment was at the server's start; `_started` made it large enough.
    """
    os.environ.clear()  # the C library must not refer to the old text
    os.environ.update(env)
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[ENVIRON])
    text = b"\0".join(os.fsencode(f"{name}={value}") for name, value in env.items())
    if len(text) >= end - start:
        raise ValueError("the environment is too long")
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _watch(connection: socket.socket, pid: int) -> None:
    """Pass signals on and tell the exit code; the end of the interpreter is the end of the process, too."""
    end = os.pidfd_open(pid)
    while True:
        ready = select.select([connection, end], [], [])[0]
        if end in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            processes.kill_descendants()
            with contextlib.suppress(OSError):
                connection.send(str(code).encode())
            return
        told = connection.recv(99)
        if not told:
            processes.kill(pid, signal.SIGKILL)
            processes.kill_descendants()
            return
        processes.kill(pid, int(told))


def _import_compiled(compiled: dict[bytes, CodeType]) -> None:
    """Import modules with a known source without compiling the source again; tracebacks name the module's own file."""
    compiler = importlib.machinery.SourceFileLoader.source_to_code

    def source_to_code(loader: Any, data: Any, path: Any, **more: Any) -> CodeType:
        if (code := compiled.get(bytes(data))) is None:
            return compiler(loader, data, path, **more)
        _imp._fix_co_filename(code, path)  # as Python does for the code of a moved .pyc file
        return code

    importlib.machinery.SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]


def _main() -> None:
    sys.path[:] = sys.path[2:]  # this file's folder has a module `azure`, too
    for name in TORCH:
        __import__(name)
    sources = [(path.read_bytes(), path) for path in ENTRYPOINTS.rglob("*.py")]
    compiled = {source: compile(source, path, "exec", dont_inherit=True) for source, path in sources}
    inspect.stack = warmpython.quick_stack
    warmpython.freeze()
    SOCKET.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(SOCKET))
    SOCKET.chmod(0o666)
    own = SOCKET.stat().st_ino
    listener.listen(64)
    PROXY.write_text(Path(warmproxy.__file__).read_text())
    HOOK.write_text(HOOK_TEXT)
    print("ready", flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    asked = _serve(listener)
    if asked is None:
        with _alone():
            if SOCKET.stat().st_ino == own:  # else the files are a successor's
                for path in (HOOK, SOCKET, PROXY):
                    path.unlink()
        return
    request, folders = asked
    sys.executable, sys.orig_argv = request["executable"], [request["executable"], *request["args"]]
    os.getppid = lambda: int(request["parent"])  # programs compare their parent, or send a signal to it
    # The node has its own copy of cloudtrain, and finds no installed copy in a container.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("cloudtrain", "doubles")]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if warmproxy.name_of(finder) in request["finders"]]
    sys.path_importer_cache.clear()
    _import_compiled(compiled)
    warmpython.become({**request, "session": False}, folders)


if __name__ == "__main__":
    _main()
