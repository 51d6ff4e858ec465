"""The claim of a job's newest attempt: a small object in the job's store, whose numbers only rise.

Node 0 takes the claim for its attempt before ranks start, and the launcher raises the claim before it sends the next
attempt. By compare-and-swap, either a late container finds the higher number and ends, or the launcher finds that the
attempt has started. In a store that ignores conditions, two writes within milliseconds may both count as the first.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from .store import Store, StoreError

NAME = ".claim"  # no name of a checkpoint (contract.is_whole)
_TRIES = 20  # each failure means that another writer has raised the claim


class AttemptClaim(NamedTuple):
    """The highest attempt that may run, and the highest attempt that has started; 0: none."""

    newest: int = 0
    started: int = 0


def parsed(data: bytes | None) -> AttemptClaim:
    """Return the claim in the object's content; a missing or damaged object is a claim of no attempt."""
    found = re.fullmatch(rb'{"newest": (\d{1,9}), "started": (\d{1,9})}', data or b"")
    return AttemptClaim(int(found[1]), int(found[2])) if found else AttemptClaim()


def take(store: Store, name: str, attempt: int, *, starts: bool = False) -> AttemptClaim:
    """Raise the claim to the attempt, which `starts` if no later attempt has the claim; return the claim that counts.

    Attempt 0 only reads. Raises OSError if the store does not answer, or refuses.
    """
    for _ in range(_TRIES):
        data, version = store.read(name)
        claim = parsed(data)
        started = max(claim.started, attempt) if starts and claim.newest <= attempt else claim.started
        wanted = AttemptClaim(max(claim.newest, attempt), started)
        if wanted == claim or store.put_if(json.dumps(wanted._asdict()).encode(), name, version):
            return wanted
    raise StoreError(f"{name} cannot be written: the store refuses conditional writes")
