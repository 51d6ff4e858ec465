"""Whether a script's ranks have met: joined a process group of all ranks.

Ranks that never meet each train alone on all of the data, and all of them end well. So a rank that joins such a group
notes that in a file, and boot fails a job without (boot.py); a rank that has joined no group for a minute warns.
The group is noted in the rank's own process; processes that the script starts are not seen.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["WAIT_S", "alone", "expect", "failure", "say_alone", "watch_groups", "watch_launchers"]

WAIT_S = 60.0
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed")
_started: list[str] = []  # launchers that the script has started
_GENERAL = (
    "call torch.distributed.init_process_group, or give the library that does so the number of nodes and ranks; "
    "`distributed.allow_alone: true` accepts ranks without a group"
)


def _file(kind: str) -> Path:
    return Path(os.environ["CLOUDTRAIN_RESULT_DIR"]) / f"{kind}-{os.environ['RANK']}"


def expect(run: dict[str, Any]) -> int:
    """Return the number of ranks that have to meet, 0 where no group is needed."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks < 2 or run["kind"] == "task" or run.get("allow_alone") or "CLOUDTRAIN_RESULT_DIR" not in os.environ:
        return 0
    _file("met").unlink(missing_ok=True)  # a predecessor's, where torchrun restarts ranks in place
    return ranks


def watch_launchers(event: str, args: tuple[Any, ...]) -> None:
    """Note a launcher that the script starts: a hook for sys.addaudithook."""
    if event == "subprocess.Popen" and not _started:
        command = args[1] if isinstance(args[1], (list, tuple)) else str(args[1]).split()
        words = [Path(os.fsdecode(word)).name for word in command[:4]]
        _started.extend(word for word in words if word in _LAUNCHERS)


def watch_groups(module: ModuleType, ranks: int) -> None:
    """Have torch.distributed note when this rank has joined a group of all ranks."""
    init = module.init_process_group

    @functools.wraps(init)
    def joined(*args: Any, **kwargs: Any) -> Any:
        result = init(*args, **kwargs)
        if module.get_world_size() >= ranks:
            _file("met").touch()
        return result

    module.init_process_group = joined  # type: ignore[attr-defined]


def alone(ranks: int) -> str | None:
    """Return why this rank is alone and what to do, None once it has met the others."""
    if _file("met").exists():
        return None
    if _started:
        return (
            f"the script starts a launcher of its own ({_started[0]}), but cloudtrain starts one rank for each GPU "
            "already: run the inner script instead"
        )
    if {"lightning", "pytorch_lightning"} & sys.modules.keys():
        return (
            f"Lightning was told of fewer: leave num_nodes and devices of the Trainer out, or set them ({ranks} ranks "
            f"on {os.environ.get('CLOUDTRAIN_NUM_NODES', '1')} nodes)"
        )
    return _GENERAL


def say_alone(ranks: int) -> None:
    """Leave the reason for boot, at the end of a rank that has met no others."""
    if ranks and (why := alone(ranks)) is not None:
        _file("alone").write_text(why)


def failure(folder: Path, nproc: int, ranks: int) -> dict[str, Any] | None:
    """Return the failure of a job whose ranks on this node have not all met, None if they have."""
    if len(list(folder.glob("met-*"))) >= nproc:
        return None
    why = next((path.read_text() for path in sorted(folder.glob("alone-*"))), _GENERAL)
    message = f"the {ranks} ranks have joined no process group: each has trained alone, on all of the data; {why}"
    return {"rank": None, "kind": "config", "message": message}
