"""The last look before money is spent: what will be sent, what it may cost, and whether it may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.launcher.terminal import confirm, say

if TYPE_CHECKING:
    from cloudtrain.launcher.prepare import Prepared

__all__ = ["approved"]


def approved(prepared: Prepared, *, yes: bool, more: bool = False) -> bool:
    """Show the plan and ask about its worst case; a budget in the config is the answer to that. `more`: on top.

    Raises UsageError where nobody can be asked.
    """
    for line in (*prepared.plan.lines(), f"code: {prepared.bundle.summary()}", *prepared.warnings):
        say(line)
    worst = prepared.plan.worst_case_usd
    if not worst or prepared.config.budget is not None:
        return True
    if confirm(f"This may cost up to {worst:.2f} USD{' more' if more else ''}. Send it?", yes=yes):
        return True
    say("not sent")
    return False
