"""torchrun, called as a library, so that the end of each rank is known as data.

The command line is torchrun's own. Unlike `ChildFailedError`, torchrun's messages do not reliably name the signal that
killed a rank, or the rank that failed first. The failures go to CLOUDTRAIN_RESULT_DIR/torchrun.json.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.machinery
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from .. import atomic_json, processes
from ..rank import variables

STORE_S, LOOK_S = 10.0, 0.01
# Parts of torch that torchrun does not use: 0.28 of the 0.96 s of processor time of torch's import (torch 2.13). The
# other parts save less than 0.01 s each, or other modules need them at once.
LATE = {"torch._meta_registrations", "torch.distributions", "torch.export", "torch.quantization", "torch.utils.data"}
WHOLE = "CLOUDTRAIN_WHOLE_TORCH"  # set if this process's import of torch without the parts has failed


def main(argv: list[str]) -> int:
    """Run torchrun with the arguments; return 0, or 1 if a worker failed or a signal stopped torchrun."""
    processes.die_with_parent()
    # At the end: torch may be there, and a module `random` must not hide the standard one.
    sys.path += filter(None, os.environ.get(variables.PYTHONPATH, "").split(os.pathsep))
    # A terminal's end, or a user, tells all processes: torchrun would stop its ranks. The ranks unblock the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    gc.disable()  # an import leaves no garbage: torch's is a tenth shorter
    if not (is_whole := os.environ.pop(WHOLE, None)):
        sys.meta_path.insert(0, _LateParts())
    try:
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except Exception:
        if is_whole:
            raise
        # A torch, or a plug-in of torch, that needs the parts in its own order: a process cannot import torch again.
        os.execve(sys.executable, sys.orig_argv, {**os.environ, WHOLE: "1"})
    gc.freeze()  # the first search after it takes a tenth of a second
    gc.enable()

    def stop_ranks(signum: int, frame: FrameType | None) -> NoReturn:
        """Have torchrun stop its ranks by the script's own signal: torchrun passes on the signal of the exception."""
        name = os.environ["CLOUDTRAIN_STOP_SIGNAL"]
        raise SignalException(f"stop by {name}", sigval=signal.Signals[name])

    signal.signal(signal.SIGRTMIN, stop_ranks)
    options = run.parse_args(argv)  # type: ignore[no-untyped-call]
    if int(options.node_rank):
        _await_store(options.master_addr, options.master_port)
    try:
        run.run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _write([_failure(rank, failure) for rank, failure in error.failures.items()])
        print(error, file=sys.stderr)
        return 1
    except SignalException as stop:
        print(f"torchrun: stopped by signal {int(stop.sigval)}", file=sys.stderr)
        return 1
    except Exception as error:
        # Only torchrun's own errors arrive in this branch: the nodes did not find each other, a port was in use.
        message = f"{type(error).__name__}: {error}"
        _write([{"rank": None, "kind": "rendezvous", "message": message, "time_s": time.time()}])
        print(message, file=sys.stderr)
        return 1
    return 0


class _LateParts(importlib.abc.MetaPathFinder):
    """Finds the modules of LATE, which load at the first use of a name in the module.

    importlib.util.LazyLoader loads at any look at the module, such as inspect's look for all modules' files.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname in LATE else None
        if spec is not None and spec.loader is not None:
            spec.loader = _LateLoader(spec.loader)
        return spec


class _LateLoader(importlib.abc.Loader):
    def __init__(self, own: importlib.abc.Loader) -> None:
        self._own = own

    def exec_module(self, module: ModuleType) -> None:
        def load(name: str) -> Any:
            if name.startswith("__") and name != "__all__":
                raise AttributeError(name)
            assert module.__spec__ is not None
            module.__spec__.loader = module.__loader__ = self._own
            del module.__dict__["__getattr__"]  # of PEP 562: for names that the module does not have
            self._own.exec_module(module)
            return getattr(module, name)

        module.__dict__["__getattr__"] = load


def _await_store(address: str, port: int) -> None:
    """Return when node 0's store listens, or after STORE_S: at a refusal torch sleeps, half a second and more."""
    end_s = time.monotonic() + STORE_S
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError), socket.create_connection((address, port), STORE_S):
            return
        time.sleep(LOOK_S)


def _failure(rank: int, failure: Any) -> dict[str, Any]:
    code, killed = failure.exitcode, failure.exitcode < 0
    words = f" (128 + {signal.Signals(code - 128).name})" if code - 128 in set(signal.Signals) else ""  # of a shell
    return {
        "rank": rank,
        "kind": "signal" if killed else "exit",
        "signal": failure.signal_name() if killed else None,
        "exit_code": code,
        "message": f"killed by {failure.signal_name()}" if killed else f"exited with code {code}{words}",
        "time_s": float(failure.timestamp),
    }


def _write(failures: list[dict[str, Any]]) -> None:
    atomic_json.write_json(Path(os.environ["CLOUDTRAIN_RESULT_DIR"], "torchrun.json"), failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
