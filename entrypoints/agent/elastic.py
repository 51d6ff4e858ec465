"""torchrun, called as a library, so that the end of each rank is known as data.

The command line is torchrun's own. Unlike `ChildFailedError`, torchrun's messages do not reliably name the signal that
killed a rank, or the rank that failed first. The failures go to CLOUDTRAIN_RESULT_DIR/torchrun.json.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from .. import atomic_json, processes
from ..rank import variables

STORE_S, LOOK_S = 10.0, 0.01


def main(argv: list[str]) -> int:
    """Run torchrun with the arguments; return 0, or 1 if a worker failed or a signal stopped torchrun."""
    processes.die_with_parent()
    # At the end: torch may be there, and a module `random` must not hide the standard one.
    sys.path += filter(None, os.environ.get(variables.PYTHONPATH, "").split(os.pathsep))
    # A terminal's end, or a user, tells all processes: torchrun would stop its ranks. The ranks unblock the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    gc.disable()  # an import leaves no garbage: torch's is a tenth shorter
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    gc.enable()

    def stop_ranks(signum: int, frame: FrameType | None) -> NoReturn:
        """Have torchrun stop its ranks by the script's own signal: torchrun passes on the signal of the exception."""
        name = os.environ["CLOUDTRAIN_STOP_SIGNAL"]
        raise SignalException(f"stop by {name}", sigval=signal.Signals[name])

    signal.signal(signal.SIGRTMIN, stop_ranks)
    options = run.parse_args(argv)  # type: ignore[no-untyped-call]
    if options.rdzv_backend == "static" and int(options.node_rank):
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
    folder = os.environ.get("CLOUDTRAIN_RESULT_DIR")
    if folder:
        atomic_json.write_json(Path(folder) / "torchrun.json", failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
