"""Checks whether a script's ranks have joined a process group of all ranks.

Ranks without a common group each train alone on all of the data, and end without an error. So a rank leaves a file when
it joins a group of all ranks, and boot fails a job without these files (boot.py). After a minute without a group the
rank warns, and a rehearsal ends. Only groups of the rank's own process count; processes started by the script are not
seen. A rank that waits for the others at a place of the script's own is told from a rank that never called.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from ..contract import ALONE, RunSpec
from ..rank import rehearsal

WAIT_S = 60.0
_PLACE = ("MASTER_ADDR", "MASTER_PORT")
_OWN = ("localhost", "127.0.0.1", "0.0.0.0", "::1")  # on each machine, that machine

_given: dict[str, str] = {}  # torchrun's variables, which a script may change
_calls: list[dict[str, Any]] = []  # init_process_group's arguments, and `failed`, from the call until all have come


def _file(kind: str) -> Path:
    return Path(_given["CLOUDTRAIN_RESULT_DIR"]) / f"{kind}-{_given['RANK']}"


def expect(run: RunSpec) -> int:
    """Return the number of ranks in the required group, 0 if no group is required."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks < 2 or run.is_own or run.allow_alone or "CLOUDTRAIN_RESULT_DIR" not in os.environ:
        return 0
    _given.update({name: os.environ.get(name, "") for name in ("CLOUDTRAIN_RESULT_DIR", "RANK", "WORLD_SIZE", *_PLACE)})
    _file("met").unlink(missing_ok=True)  # left by a predecessor, if torchrun restarts ranks in place
    return ranks


def watch_groups(module: ModuleType, ranks: int) -> None:
    """Patch torch.distributed to leave the file when the rank has joined a group of all ranks."""
    init, met = module.init_process_group, _file("met")

    @functools.wraps(init)
    def joined(*args: Any, **kwargs: Any) -> Any:
        _calls[:] = [inspect.signature(init).bind_partial(*args, **kwargs).arguments]
        try:
            result = init(*args, **kwargs)
        except Exception as error:
            _calls[0]["failed"] = error
            raise
        with contextlib.suppress(OSError, ValueError):  # a full disk; a group without this rank
            if (is_part := module.get_world_size() < ranks) or _meets_only_here():
                _calls[0]["is_part"] = is_part
                report_missing_group(ranks)
            else:
                _calls.clear()
                met.touch()
        return result

    module.init_process_group = joined  # type: ignore[attr-defined]
    package = sys.modules.get("torch.distributed")  # imported before, the package holds the function itself
    if getattr(package, "init_process_group", None) is init:
        package.init_process_group = joined  # type: ignore[union-attr]


def is_unmet() -> bool:
    """Return whether the rank should have joined a group of all ranks, and has not."""
    return bool(_given) and not _file("met").exists()


def is_compiling() -> bool:
    """Return whether the main thread builds an extension of torch, or waits for the build of another rank.

    DeepSpeed builds its collectives for CPUs before its ranks meet, which may take minutes.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not frame.f_code.co_filename.endswith("torch/utils/cpp_extension.py"):
        frame = frame.f_back
    return frame is not None


def _meets_only_here() -> bool:
    """Return whether a rehearsal's nodes, which share a machine, met at an address that is each machine's own."""
    store = _calls[0].get("store")
    method = str(_calls[0].get("init_method") or "").partition("://")[2]
    host = getattr(store, "host", "") if store else method.rpartition(":")[0] or os.environ.get("MASTER_ADDR")
    is_several = os.environ.get("CLOUDTRAIN_NUM_NODES", "1") != "1"
    return rehearsal.VARIABLE in os.environ and is_several and host in _OWN and _given["MASTER_ADDR"] not in _OWN


def detour() -> str | None:
    """Return where the rank looks for the others, and where they meet, if the script has changed the place."""
    call = _calls[0] if _calls else {}
    given, wrong = f"{_given['MASTER_ADDR']}:{_given['MASTER_PORT']}", []
    method = str(call.get("init_method") or "env://")
    if not method.startswith("env://"):
        at = method.partition("://")[2] or method
        wrong += [f"init_method {method}"] if at.split("?")[0].rstrip("/") != given else []
    elif (store := call.get("store")) is not None:
        wrong += [f"the store at {store.host}"] if getattr(store, "host", "") in _OWN else []
    else:
        wrong += [f"{name} {os.environ.get(name)}" for name in _PLACE if os.environ.get(name) != _given[name]]
    for name, argument in (("RANK", "rank"), ("WORLD_SIZE", "world_size")):
        own = call.get(argument, -1)
        own = os.environ.get(name) if own in (-1, None) else own
        wrong += [f"{name} {own}, given as {_given[name]}"] if str(own) != _given[name] else []
    if not wrong:
        return None
    return (
        f"this rank looks for the others by {', '.join(wrong)}, set by the script; they meet at {given}: leave the "
        "variables of torchrun as they are, and call init_process_group without init_method, rank and world_size"
    )


def missing_group(ranks: int) -> str | None:
    """Return why the rank is alone and how to fix the fault, None after the rank has joined a group of all."""
    if not is_unmet():
        return None
    if _calls:
        if _calls[0].get("is_part"):
            return "; ".join(filter(None, [detour(), ALONE]))
        failed = str(_calls[0].get("failed") or "")
        waits = "it waits in init_process_group for ranks that have not called it"
        is_over = failed and "time" not in failed.lower()
        return detour() or (f"init_process_group failed: {failed}" if is_over else waits)
    if {"lightning", "pytorch_lightning"} & sys.modules.keys():
        return (
            f"Lightning is set to fewer ranks: leave num_nodes and devices of the Trainer out, or set them ({ranks} "
            f"ranks on {os.environ.get('CLOUDTRAIN_NUM_NODES', '1')} nodes)"
        )
    return ALONE


def report_missing_group(ranks: int) -> None:
    """Leave the reason for boot, at the end of a rank without a group."""
    if ranks and (why := missing_group(ranks)) is not None:
        _file("missing_group").write_text(why)


def failure(folder: Path, nproc: int, ranks: int) -> dict[str, Any] | None:
    """Return the failure if a rank of the node has joined no group of all ranks."""
    if len(list(folder.glob("met-*"))) >= nproc:
        return None
    why = next((path.read_text() for path in sorted(folder.glob("missing_group-*"))), ALONE)
    message = f"the {ranks} ranks have joined no process group of torch.distributed: each has trained alone, on all of "
    message += f"the data; the files are kept; {why}"
    return {"rank": None, "kind": "config", "message": message}
