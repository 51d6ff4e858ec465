"""A rank: the thin shell between torchrun and the user's code.

    torchrun ... worker.py task                     the shared trainer, with the task file that the spec names
    torchrun ... worker.py sweep                    the controller of a sweep, with the spec's search
    torchrun ... worker.py script train.py --lr 1   any script, run like `python train.py --lr 1`
    torchrun ... worker.py module pkg.train --lr 1  any module, run like `python -m pkg.train --lr 1`

The shell gives the rank its own log file, ends the rank when torchrun ends, and records the exception that ends the
rank: a plain script leaves torchrun only an exit code. The shell also records that all work is done, before the
interpreter's teardown, which may hang or abort.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import errno
import inspect
import json
import os
import re
import runpy
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from .. import atomic_json, processes
from ..checkpoints.folder import CheckpointError
from ..errors import TaskError
from ..rank import heartbeat, tracebacks, variables
from ..scripts import meeting, rank
from .node_logs import last_lines

EXIT_CONFIG = 64
EXIT_SAVED = 75

# Errors that a rank raises after a peer's death: never the root cause if a rank has a different failure. The first
# pattern matches the transports' own messages; a script may raise messages of the second for unrelated reasons.
_TRANSPORT = re.compile(
    r"gloo/transport|closed by peer|NCCL communicator was aborted|NCCL error: remote", re.IGNORECASE
)
_PEER_LOST = re.compile(
    r"gloo|nccl|connection (reset|closed|refused)|broken pipe|socket (timeout|closed|error)|timed out waiting"
    r"|store.*timeout|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)
# Messages of torch.save and its streams on a full disk.
_DISK = re.compile(r"unexpected pos|iostream error|No space left|PytorchStreamWriter failed")
LITTLE_BYTES = 100_000_000
TRACE_CHARACTERS = 16_000
_PEER_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")


def main(argv: list[str]) -> int:
    """Run the rank and return its exit code; a script's exception has been recorded and printed."""
    processes.die_with_parent()
    processes.outlive_save_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    # Not earlier: `-m` puts the current folder before the standard library, and the code may have a module `random`.
    if place := os.environ.get("CLOUDTRAIN_CODE_DIR"):
        os.chdir(place)
        sys.path[0] = place
    variables.deadline_s(os.environ)  # before the import of torch, which takes seconds
    _name_run(os.environ)
    _number_for_slurm(os.environ)
    _track(os.environ)
    if logs := os.environ.get("CLOUDTRAIN_LOG_DIR"):  # a supervisor reads a file per rank
        processes.write_into(Path(logs) / f"rank-{os.environ.get('RANK', '0')}.log")
    heartbeat.enable()
    folder, number = Path(os.environ["CLOUDTRAIN_RESULT_DIR"]), int(os.environ.get("RANK", "0"))
    ending = _RankProcess(os.getpid(), folder / f"left-{number}")
    ending.file.unlink(missing_ok=True)  # a predecessor's file
    atexit.register(_note_end, ending)  # registered first, so that `_note_end` runs after the script's handlers
    kind, *rest = argv
    try:
        if kind in ("task", "sweep"):
            _run_own(ending, kind)
        rank.begin(kind)
        _run_user_code(kind, rest)
    except SystemExit as leaving:
        if isinstance(leaving.code, str):  # `sys.exit("no data")`: the message is the cause
            return _record(leaving, number, folder)
        ending.code = leaving.code or 0
        raise
    except BaseException as error:
        code = _record(error, number, folder)
        if kind in ("task", "sweep"):
            _leave(code)
        return code
    ending.code = 0
    return 0


@dataclass
class _RankProcess:
    """The rank's pid, the file that records its end, and its exit code after all work is done."""

    pid: int
    file: Path
    code: int | None = None


def _run_own(ending: _RankProcess, kind: str) -> NoReturn:
    if kind == "sweep":
        from ..sweep import packed

        ending.code = packed.main("cloudtrain.entrypoints.agent.elastic", "cloudtrain.entrypoints.agent.worker")
    else:
        rank.watch_imports({})
        from ..trainer import train

        _take_path(os.environ)
        try:
            ending.code = train.main()
        except SystemExit as leaving:
            if leaving.code:
                raise
            raise TaskError("ended with code 0 before the training was done: the task's code called exit") from leaving
    _note_end(ending)
    _leave(ending.code)


def _name_run(environ: MutableMapping[str, str]) -> None:
    """Give the run an id and its restarts: torchrun does not know the job, nor the restarts by cloudtrain's agents."""
    if "TORCHELASTIC_RUN_ID" in environ and "CLOUDTRAIN_JOB" in environ:
        environ["TORCHELASTIC_RUN_ID"] = f"{environ['CLOUDTRAIN_JOB']}-{environ.get('CLOUDTRAIN_ATTEMPT', '1')}"
        counts = (environ.get(name) or "0" for name in ("CLOUDTRAIN_RESTART", "TORCHELASTIC_RESTART_COUNT"))
        environ["TORCHELASTIC_RESTART_COUNT"] = str(sum(map(int, counts)))


def _track(environ: MutableMapping[str, str]) -> None:
    """Have rank 0 go on in the job's run of W&B or MLflow (scripts/trackers.py); the job's own variables win."""
    group, job = environ.get("CLOUDTRAIN_TRACKED_AS"), environ.get("CLOUDTRAIN_JOB")
    if group and job and environ.get("RANK") == "0":
        environ.setdefault("MLFLOW_RUN_CONTEXT", json.dumps({"cloudtrain.job": job}))
        environ.setdefault("WANDB_RUN_GROUP", group)
        if "WANDB_RUN_ID" not in environ:
            environ["WANDB_RUN_ID"] = job
            environ.setdefault("WANDB_RESUME", "allow")


def _number_for_slurm(environ: MutableMapping[str, str]) -> None:
    """Give Slurm's variables, if shown, the numbers of this rank: Slurm knows one task a node."""
    if "SLURM_JOB_ID" in environ and "RANK" in environ:
        local, nodes = environ["LOCAL_WORLD_SIZE"], environ["CLOUDTRAIN_NUM_NODES"]
        for names, value in (
            (("NTASKS", "NPROCS", "STEP_NUM_TASKS"), environ["WORLD_SIZE"]),
            (("NNODES", "JOB_NUM_NODES", "STEP_NUM_NODES"), nodes),
            (("TASKS_PER_NODE", "STEP_TASKS_PER_NODE"), f"{local}(x{nodes})"),
            (("NTASKS_PER_NODE",), local),
            (("PROCID",), environ["RANK"]),
            (("LOCALID",), environ["LOCAL_RANK"]),
            (("NODEID",), environ["CLOUDTRAIN_NODE_RANK"]),
        ):
            environ.update({f"SLURM_{name}": value for name in names})
        for signum in processes.SAVE_SIGNALS:  # Lightning sets its handler where the script has set none
            signal.signal(signum, signal.SIG_DFL)


def _take_path(environ: MutableMapping[str, str]) -> None:
    """Put the job's own PYTHONPATH before the standard library, as Python would have."""
    if theirs := environ.pop(variables.PYTHONPATH, None):
        own = environ.get("PYTHONPATH", "").partition(os.pathsep)[0]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [own, theirs]))
        sys.path[1:1] = [str(Path(folder).absolute()) for folder in theirs.split(os.pathsep) if folder]


def _note_end(ending: _RankProcess) -> None:
    """Write for boot that all user code is done, threads and exit handlers too."""
    if ending.code in (0, EXIT_SAVED) and os.getpid() == ending.pid:  # not in a fork by the script
        with contextlib.suppress(OSError):
            ending.file.write_text(str(ending.code))


def _leave(code: int) -> NoReturn:
    """Exit at once: all files are written, and gloo's teardown aborts or hangs one time in nine (torch 2.13)."""
    _flush()
    os._exit(code)


def _run_user_code(kind: str, command: list[str]) -> None:
    """Run the script or module like the interpreter itself, in the real `__main__`."""
    target = command[0]
    if folder := os.environ.get(variables.WORKDIR):  # as `cd src && torchrun train.py`
        target = target if kind == "module" else os.path.relpath(target, folder)
        os.chdir(folder)
        sys.path[0] = str(Path.cwd())
    sys.argv = [target, *(variables.of_rank(word, os.environ) for word in command[1:])]
    _take_path(os.environ)
    if kind == "script":
        sys.path[0] = str(Path(target).resolve().parent)  # the value was the current folder, as under `python -m`
    # Last: a file at the code's root must hide no module of the standard library and no installed package.
    roots = [folder and str(Path.cwd()), os.environ.get("CLOUDTRAIN_CODE_DIR")]
    sys.path += [root for root in roots if root and root not in sys.path]
    if kind == "module":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    source = Path(target).read_bytes()
    target = str(Path(target).absolute())  # in __main__'s code too: a script may change the folder
    # In __main__ itself, not with runpy.run_path: pickled classes and spawned data-loader workers need __main__.
    scope = sys.modules["__main__"].__dict__
    for name in [name for name in scope if not name.startswith("__")]:
        del scope[name]
    scope.update(__file__=target, __builtins__=builtins)
    scope.update(dict.fromkeys(("__package__", "__spec__", "__cached__", "__doc__")))
    exec(compile(source, target, "exec", dont_inherit=True), scope)


def _record(error: BaseException, number: int, folder: Path) -> int:
    """Record the exception for boot; print the traceback without cloudtrain's frames; return the exit code."""
    lines = traceback.format_exception(type(error), error, _user_frames(error.__traceback__))
    is_config = "TaskError" in (kind.__name__ for kind in type(error).__mro__)
    detour = meeting.detour() if type(error).__name__ in _PEER_TYPES and meeting.is_unmet() else None
    failure = {
        "rank": number,
        "kind": "config" if is_config else "exception",
        "type": type(error).__name__,
        "message": f"{str(error)[:4000]}{_full_disk(error)}{f'; {detour}' if detour else ''}",
        "traceback": _traceback(error),
        "lines": last_lines(number),
        "peer_lost": detour is None and _is_echo(error),
        "time_s": time.time(),
    }
    with contextlib.suppress(OSError):
        atomic_json.write_json(folder / f"rank-{number}.json", failure)
    _flush()  # after the cause is on disk: a stream of the script may fail or block
    if (printed := last_lines(number)) != failure["lines"]:
        with contextlib.suppress(OSError):
            atomic_json.write_json(folder / f"rank-{number}.json", {**failure, "lines": printed})
    if failure["peer_lost"]:  # for example a collective's timeout: show which rank is stuck, and where
        heartbeat.print_stacks(folder, heartbeat.STALE_S)
    if is_config or isinstance(error, CheckpointError):  # an error in the user's files: cloudtrain's frames do not help
        lines = _without_ours(error)
    elif (hook := _own_hook()) is not None and not isinstance(error, SystemExit):
        with contextlib.suppress(Exception):
            error = error.with_traceback(_user_frames(error.__traceback__))
            hook(type(error), error, error.__traceback__)
            _flush()
            return 1
    shown = f"{error}\n" if isinstance(error, SystemExit) else "".join(lines)
    with contextlib.suppress(OSError):  # a full disk: the record above is enough
        os.write(2, shown.encode(errors="replace"))
    return EXIT_CONFIG if is_config else 1


def _own_hook() -> Callable[..., object] | None:
    """Return the script's `sys.excepthook`, such as a crash reporter's; torch wraps any hook to print the rank."""
    hook: Callable[..., object] = sys.excepthook
    while getattr(hook, "__module__", None) == "torch.distributed.distributed_c10d":
        hook = inspect.getclosurevars(hook).nonlocals.get("old_hook", sys.__excepthook__)
    return None if hook is sys.__excepthook__ else hook


def _flush() -> None:
    """Flush the rank's output; the streams may be any objects that a script has set."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _full_disk(error: BaseException) -> str:
    """Return a note on a full disk if a full disk may be the cause: torch.save does not report the cause."""
    is_no_space = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if not is_no_space and not _DISK.search(str(error)):
        return ""
    parts = []
    for name in ("CLOUDTRAIN_CHECKPOINT_DIR", "CLOUDTRAIN_OUTPUT_DIR"):
        with contextlib.suppress(KeyError, OSError):
            free = shutil.disk_usage(os.environ[name]).free
            if free < LITTLE_BYTES:
                parts.append(f"the disk of {os.environ[name]} is full: {free / 1e6:.0f} MB free")
    return f"; {'; '.join(parts)}" if parts else ""


def _is_echo(error: BaseException) -> bool:
    """Return whether a rank raises the error because a peer is gone.

    The loose pattern counts only while the process group exists: before the ranks have met, no peer can be lost. For
    a script that destroys its group in a `finally`, only the transport's own messages count.
    """
    if type(error).__name__ in _PEER_TYPES or (isinstance(error, RuntimeError) and _TRANSPORT.search(str(error))):
        return True
    distributed = sys.modules.get("torch.distributed")
    have_met = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return have_met and isinstance(error, (RuntimeError, OSError)) and bool(_PEER_LOST.search(str(error)))


def _traceback(error: BaseException) -> str:
    """Return the traceback, at most TRACE_CHARACTERS of its frames and of its message."""
    text = "".join(_without_ours(error))
    if len(text) <= TRACE_CHARACTERS:
        return text
    frames, end = tracebacks.frames_of(text)
    kept = tracebacks.chosen(frames, lambda lines: len("\n".join(lines)) <= TRACE_CHARACTERS)
    return "\n".join([*kept, "\n".join(end)[:TRACE_CHARACTERS]])


def _without_ours(error: BaseException) -> list[str]:
    """Return the traceback without cloudtrain's frames; files of the user's code have relative paths."""
    ours = str(Path(__file__).parents[1])
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((ours, "<frozen"))]
    frames = [f for f in frames if f.filename != runpy.__file__]
    head = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    lines = [*head, *traceback.format_exception_only(type(error), error)]
    code = os.environ.get("CLOUDTRAIN_CODE_DIR", "")
    for folder in dict.fromkeys((code, os.path.realpath(code))) if code else ():  # the path known to the user
        lines = [line.replace(f'  File "{folder}/', '  File "') for line in lines]
    return lines


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Skip this file's and runpy's frames at the top."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    from . import worker

    # The script takes over `__main__`, so the shell must run from the module `worker`.
    sys.exit(worker.main(sys.argv[1:]))
