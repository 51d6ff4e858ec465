"""Checks whether a script's ranks have joined a process group of all ranks.

Ranks without a common group each train alone on all of the data, and end without an error. So a rank leaves a file when
it joins a group of all ranks, and boot fails a job without these files (boot.py). After a minute without a group the
rank warns. Only groups of the rank's own process count; processes started by the script are not seen.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..contract import RunSpec

WAIT_S = 60.0
_GENERAL = (
    "call torch.distributed.init_process_group, or give the library that does so the number of nodes and ranks; "
    "a script that starts torchrun or another launcher: run its inner script instead, since one rank for "
    "each GPU is started already; `distributed.allow_alone: true` accepts ranks without a group"
)


def _file(kind: str) -> Path:
    return Path(os.environ["CLOUDTRAIN_RESULT_DIR"]) / f"{kind}-{os.environ['RANK']}"


def expect(run: RunSpec) -> int:
    """Return the number of ranks in the required group, 0 if no group is required."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks < 2 or run.is_own or run.allow_alone or "CLOUDTRAIN_RESULT_DIR" not in os.environ:
        return 0
    _file("met").unlink(missing_ok=True)  # left by a predecessor, if torchrun restarts ranks in place
    return ranks


def watch_groups(module: ModuleType, ranks: int) -> None:
    """Patch torch.distributed to leave the file when the rank has joined a group of all ranks."""
    init, met = module.init_process_group, _file("met")  # a script may change RANK

    @functools.wraps(init)
    def joined(*args: Any, **kwargs: Any) -> Any:
        result = init(*args, **kwargs)
        with contextlib.suppress(OSError, ValueError):  # a full disk; a group without this rank
            if module.get_world_size() >= ranks:
                met.touch()
        return result

    module.init_process_group = joined  # type: ignore[attr-defined]
    package = sys.modules.get("torch.distributed")  # imported before, the package holds the function itself
    if getattr(package, "init_process_group", None) is init:
        package.init_process_group = joined  # type: ignore[union-attr]


def missing_group(ranks: int) -> str | None:
    """Return why the rank is alone and how to fix the fault, None after the rank has joined a group of all."""
    if _file("met").exists():
        return None
    if {"lightning", "pytorch_lightning"} & sys.modules.keys():
        return (
            f"Lightning is set to fewer ranks: leave num_nodes and devices of the Trainer out, or set them ({ranks} "
            f"ranks on {os.environ.get('CLOUDTRAIN_NUM_NODES', '1')} nodes)"
        )
    return _GENERAL


def report_missing_group(ranks: int) -> None:
    """Leave the reason for boot, at the end of a rank without a group."""
    if ranks and (why := missing_group(ranks)) is not None:
        _file("missing_group").write_text(why)


def failure(folder: Path, nproc: int, ranks: int) -> dict[str, Any] | None:
    """Return the failure if a rank of the node has joined no group of all ranks."""
    if len(list(folder.glob("met-*"))) >= nproc:
        return None
    why = next((path.read_text() for path in sorted(folder.glob("missing_group-*"))), _GENERAL)
    message = f"the {ranks} ranks have joined no process group of torch.distributed: each has trained alone, on all of "
    message += f"the data; the files are kept; {why}"
    return {"rank": None, "kind": "config", "message": message}
