"""A stand-in for the interpreter: processes start with large modules already imported, as torch or a cloud's SDK.

Importing torch and the trainer takes some four seconds of processor time, several times as long as most test runs of
the trainer. A template, shared by all workers of a test session, imports the modules once and forks a server for each
worker. The server forks each process, `python -m MODULE` or `python SCRIPT`, with its own arguments, folder,
environment and output, until the usual end. torchrun's ranks are forked, too. A warm process cannot show a missing
import: some runs of each kind use the real interpreter.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from cloudtrain.entrypoints import processes

# Every optimizer imports `torch._dynamo` on its first use, and fsdp imports the last module.
TRAINER = ("torch.distributed.run", "cloudtrain.entrypoints.trainer.train", "torch._dynamo", "torch.distributed.fsdp")
POLL_S = 0.01
LEFT_S = 10.0  # for the processes started by a run to end after the run
MESSAGE_BYTES = 200_000
MOST_TRIES = 8  # to reach a template that other workers start and leave meanwhile
UNUSED_S = 60.0  # until a template without a server ends
MADV_COLLAPSE = 25  # madvise(2), since Linux 6.1; an older kernel refuses it
LARGE_PAGE = 2 << 20
# A small program in place of a command: the server runs the command with the program's folder, environment and output.
STAND_IN = """\
#!{python} -IS
import array, json, os, signal, socket, sys
command = [{command!r}, *sys.argv[1:]]
if sys.argv[1:2] in {real!r}:
    os.execv(command[0], command)
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect({server!r})
environ = dict(os.environ, WARM_PYTHON={server!r})
request = dict(args=command, env=environ, cwd=os.getcwd(), session=False)
link.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 2]))])
pid = int(link.recv(99))
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(signum, lambda number, frame: os.kill(pid, number))
code = int(link.recv(99) or -signal.SIGKILL)
os._exit(code if code >= 0 else 128 - code)
"""


class Popen:
    """A process of the server, with the part of subprocess.Popen that torchrun and `run` use."""

    def __init__(
        self,
        args: tuple[str, ...],
        env: dict[str, str],
        stdout: Any = None,
        stderr: Any = None,
        start_new_session: bool = False,
        cwd: Path | None = None,
        server: str | None = None,
    ) -> None:
        request = {"args": args[1:], "env": env, "cwd": str(cwd or Path.cwd()), "session": start_new_session}
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(server or os.environ["WARM_PYTHON"])
        files = [file.fileno() if file else number for number, file in ((1, stdout), (2, stderr))]
        socket.send_fds(self._connection, [json.dumps(request).encode()], files)
        self.args, self.pid = args, int(self._connection.recv(99))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._connection.recv(99) or -signal.SIGKILL)
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, or None before the end."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, signum: int) -> None:
        """Send the signal to a process that has not ended."""
        if self.poll() is None:
            processes.kill(self.pid, signum)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Process(Popen):
    """A process of the server with its output in pipes, with the part of subprocess.Popen that tests use."""

    def __init__(self, args: list[str], cwd: Path, env: dict[str, str], preloaded: tuple[str, ...]) -> None:
        path = _server(preloaded, adopts=False)[1]
        ends = [os.pipe(), os.pipe()]
        self.stdout, self.stderr = (os.fdopen(end, encoding="utf-8") for end, _ in ends)
        with os.fdopen(ends[0][1], "wb") as out, os.fdopen(ends[1][1], "wb") as err:
            super().__init__((sys.executable, *args), {**env, "WARM_PYTHON": path}, out, err, False, cwd, path)
        self._texts: list[str] = ["", ""]
        self._readers: list[threading.Thread] = []

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return the rest of the output and of the errors after the end. Raises subprocess.TimeoutExpired."""
        end_s = None if timeout is None else time.monotonic() + timeout
        if not self._readers:
            self._readers = [threading.Thread(target=self._read, args=(index,), daemon=True) for index in (0, 1)]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(None if end_s is None else max(0.0, end_s - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if end_s is None else max(0.0, end_s - time.monotonic()))
        return self._texts[0], self._texts[1]

    def _read(self, index: int) -> None:
        with (self.stdout, self.stderr)[index] as file:
            self._texts[index] = file.read()


def run(
    args: list[str],
    cwd: Path,
    env: dict[str, str],
    timeout_s: float,
    preloaded: tuple[str, ...] = TRAINER,
    *,
    may_leave: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Return the result of `subprocess.run([sys.executable, *args], capture_output=True)` in a new session.

    The process begins with the modules `preloaded` imported. Raises subprocess.TimeoutExpired, and AssertionError if
    the run leaves processes behind, unless it `may_leave` daemons.
    """
    server, path = _server(preloaded, adopts=not may_leave)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = Popen((sys.executable, *args), {**env, "WARM_PYTHON": path}, out, err, True, cwd, path)
        try:
            code = process.wait(timeout_s)
            end_s = time.monotonic() + LEFT_S
            while not may_leave and (left := _children(server)):
                assert time.monotonic() < end_s, f"left behind: {left}"
                time.sleep(POLL_S)
        finally:
            root = process.pid if may_leave else server  # a server that adopts runs no other process
            has_left = process.poll() is None or (not may_leave and _children(server))
            for pid in processes.descendants(root) if has_left else ():
                processes.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait(LEFT_S)
        texts = [(file.seek(0), io.StringIO(file.read().decode(), None).read())[1] for file in (out, err)]
    return subprocess.CompletedProcess(args, code, *texts)


def write_stand_in(path: Path, command: Path, preloaded: tuple[str, ...], real: list[str]) -> None:
    """Write a program that runs the command as a warm process; with a first word of `real`, the command itself."""
    server = _server(preloaded, adopts=False)[1]
    words = [[word] for word in real]
    path.write_text(STAND_IN.format(python=sys.executable, command=str(command), server=server, real=words))
    path.chmod(0o755)


def _children(server: int) -> list[str]:
    """Return the pids of the server's children: quicker than a search of all processes."""
    return Path(f"/proc/{server}/task/{server}/children").read_text().split()


@functools.cache
def _server(preloaded: tuple[str, ...], *, adopts: bool) -> tuple[int, str]:
    """Return the pid and the address of a server that ends with this process.

    `adopts`: the server becomes the parent of the processes that its children leave.
    """
    folder = tempfile.TemporaryDirectory(prefix="warm-python-")
    path = f"{folder.name}/socket"
    link, pid = _fork_of_template(preloaded, json.dumps([path, adopts]))

    def end() -> None:
        processes.kill(pid, signal.SIGKILL)
        with link:
            link.recv(1)  # returns when the server has ended
        folder.cleanup()

    atexit.register(end)
    return pid, path


def _fork_of_template(preloaded: tuple[str, ...], request: str) -> tuple[socket.socket, int]:
    """Return the connection to a new server, and the server's pid; start the template if there is no template yet."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    address = f"warm-{session}-{hashlib.sha256(' '.join(preloaded).encode()).hexdigest()[:16]}"
    for _ in range(MOST_TRIES):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the template was ending
            if link.connect_ex(f"\0{address}") != 0:
                _start_template(address, preloaded)
            elif link.send(request.encode()) and (told := link.recv(99)):
                return link, int(told)
        link.close()
    raise AssertionError("the warm interpreter did not start")


def _start_template(address: str, preloaded: tuple[str, ...]) -> None:
    """Return when a template listens at the address: the started template, or the template of a different worker."""
    # Each run has its own CLOUDTRAIN variables: tests search for the processes left by a run by these variables.
    env = {name: value for name, value in os.environ.items() if not name.startswith("CLOUDTRAIN_")}
    template = subprocess.Popen(
        [sys.executable, __file__, address, *preloaded],
        env={**env, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},  # read when the libraries are loaded
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert template.stdout is not None
    with template.stdout:
        assert template.stdout.readline() in (b"listens\n", b"taken\n"), "the warm interpreter did not start"
    template.returncode = 0  # ends by itself after the last server


class _Ends:
    """A file for `select` that is readable after the end of a child process."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._reader

    def clear(self) -> None:
        """Forget the ends so far: call before the search for ended processes."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)

    def close(self) -> None:
        """Watch no processes: for a fork of the watching process."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.close(self._reader)
        os.close(self._writer)


def _template(listener: socket.socket) -> tuple[socket.socket, str, bool] | None:
    """Fork a server for every request; return the request in the server, None after the end of the last server."""
    running: set[int] = set()
    ends = _Ends()
    while True:
        if listener in select.select([listener, ends], [], [], None if running else UNUSED_S)[0]:
            link, _ = listener.accept()
            request = link.recv(MESSAGE_BYTES)
            pid = os.fork() if request else 0
            if request and pid == 0:
                ends.close()
                listener.close()
                path, adopts = json.loads(request)
                return link, path, adopts
            if request:
                running.add(pid)
            link.close()
        ends.clear()
        while running and (pid := os.waitpid(-1, os.WNOHANG)[0]):
            running.discard(pid)
        if not running:
            return None


def _serve(listener: socket.socket, link: socket.socket) -> dict[str, Any]:
    """Fork for every request and send each child's exit code; return the request in the child process.

    The server ends when the worker at the other end of `link` ends.
    """
    running: dict[int, socket.socket] = {}
    ends = _Ends()
    while True:
        ready = select.select([listener, link, ends], [], [])[0]
        if link in ready:
            os._exit(0)
        if listener in ready:
            connection, _ = listener.accept()
            data, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
            pid = os.fork()
            if pid == 0:
                for each in (ends, listener, link, connection, *running.values()):
                    each.close()
                for number, file in zip((1, 2), files, strict=True):
                    os.dup2(file, number)
                    os.close(file)
                return json.loads(data)
            for file in files:
                os.close(file)
            connection.send(str(pid).encode())
            running[pid] = connection
        ends.clear()
        _tell_ends(running)


def _tell_ends(running: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in running:  # else an orphan
            with running.pop(pid) as connection, contextlib.suppress(OSError):  # the requester may have ended
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def become(request: dict[str, Any], folders: list[str]) -> None:
    """Become the requested process, as `python ARGS` would be."""
    if request["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in request.get("ignored", ()):
        signal.signal(signum, signal.SIG_IGN)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    args = request["args"]
    if args[0] == "-u":
        args = args[1:]
        for name, number in (("stdout", 1), ("stderr", 2)):
            setattr(sys, name, io.TextIOWrapper(io.FileIO(number, "w", closefd=False), write_through=True))
    if args[0] != "-m":
        sys.argv, sys.path[:] = args, [str(Path(args[0]).resolve().parent), *folders]
        _run_and_leave(functools.partial(runpy.run_path, args[0], run_name="__main__"))
    name, sys.path[:] = args[1], [str(Path.cwd()), *folders]
    sys.argv = [name, *args[2:]]
    if name == "torch.distributed.run":
        handler = sys.modules["torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"]
        handler.Popen = Popen
    sys.modules.pop(name, None)  # `run_module` loads the module again, under the name __main__
    _run_and_leave(functools.partial(runpy.run_module, name, run_name="__main__", alter_sys=True))


def _run_and_leave(program: Callable[[], Any]) -> NoReturn:
    """Run the program to its end, and free its objects, without the rest of the interpreter's teardown.

    The rest frees, and therefore first copies, all modules: 0.45 s of processor time for a rank with torch.
    """
    code: Any = 0
    try:
        program()
    except SystemExit as leaving:
        code = leaving.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush()
    gc.collect()
    _flush()
    os._exit(code & 0xFF)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def quick_stack(context: int = 1) -> list[inspect.FrameInfo]:
    """Return what `inspect.stack` returns, without source lines.

    torchrun asks for the stack twice for each event of a rendezvous, and some SDKs at each call. With thousands of
    modules each frame of a frozen module costs a search of them all: a tenth of the time of all warm processes.
    """
    frame: FrameType | None = sys._getframe(1)
    stack = []
    while frame is not None:
        code = frame.f_code
        stack.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
        frame = frame.f_back
    return stack


def freeze() -> None:
    """Leave the objects made so far out of each search for garbage and out of the end, in large pages.

    A fork copies the table of pages, and its end frees the table: with torch 36 ms of processor time, with large pages
    8 ms.
    """
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # else each process first copies what torch frees at its end, in 60 ms
    gc.collect()
    gc.freeze()  # objects that are never collected are never copied
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, rights, _, _, inode, *_ = line.split()
        begin, end = (int(address, 16) for address in area.split("-"))
        begin, end = -(-begin // LARGE_PAGE) * LARGE_PAGE, end // LARGE_PAGE * LARGE_PAGE
        if rights == "rw-p" and inode == "0" and begin < end:
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)


def _import(name: str) -> None:
    """Import a module; `package.*` is a package with all modules below, and `/PATH.py` a file."""
    if name.endswith(".py"):
        runpy.run_path(name)
        return
    package = importlib.import_module(name.removesuffix(".*"))
    if name.endswith(".*"):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)


def _main() -> None:
    address, *preloaded = sys.argv[1:]
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{address}")
    except OSError:
        print("taken", flush=True)
        return
    listener.listen(64)
    print("listens", flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    folders = sys.path[1:]
    sys.path[:] = folders  # this file's folder has a module `azure`, too
    for name in preloaded:
        _import(name)
    inspect.stack = quick_stack
    freeze()
    asked = _template(listener)
    if asked is None:
        return
    link, path, adopts = asked
    if adopts:
        processes.become_subreaper()
    own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.bind(path)
    own.listen(64)
    link.send(str(os.getpid()).encode())
    become(_serve(own, link), folders)


if __name__ == "__main__":
    _main()
