"""What this machine would refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from cloudtrain.launcher.errors import Fault

__all__ = ["faults"]

MAX_INSTANCES = 64  # each is a torchrun and its ranks: about half a gigabyte


def faults(body: dict[str, Any]) -> Iterator[Fault]:
    """Yield what is wrong with a local request."""
    if len(body["nodes"]) > MAX_INSTANCES:
        yield Fault(
            f"{len(body['nodes'])} instances on one machine are too many",
            key="resources.instances",
            hint=f"the local backend starts {MAX_INSTANCES} at most",
        )
    places = {
        "checkpoint.uri": body["checkpoint_dir"],
        **{f"inputs.{name}": uri for name, uri in body["inputs"].items()},
        **{f"outputs.{name}": uri for name, uri in body["outputs"].items()},
    }
    for key, uri in places.items():
        if uri and re.match(r"[a-z0-9]+://", uri):
            yield Fault(
                f"the local backend cannot reach `{uri}`",
                key=key,
                hint=f"use a folder here: --set {key}=/some/path",
            )
