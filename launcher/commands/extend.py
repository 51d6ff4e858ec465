"""`cloudtrain extend`: a later end of an endpoint, enforced by the platform like the first."""

from __future__ import annotations

import click

from ..text.terminal import confirm, print_json, say
from .options import duration_s, examples, json_option, yes_option


@click.command("extend", epilog=examples("cloudtrain extend digits-a1b2c 2h"))
@click.argument("name")
@click.argument("duration")
@yes_option
@json_option
def command(name: str, duration: str, yes: bool, as_json: bool) -> int:
    """Let an endpoint live longer: its end, which the platform enforces, moves by DURATION, such as `2h`.

    The cost of the added time is a new worst case in your budgets, at the price of the deploy.
    """
    from ..models import deploying
    from ..store.registry import Registry
    from ..text.money import as_usd

    registry = Registry()
    found = deploying.extension(registry, name, duration_s("DURATION", duration))
    for line in found.lines():
        say(line)
    if not confirm("Move the end?", yes=yes):
        say("the end stays")
        return 1
    for line in deploying.extend(registry, found):
        say(line)
    if as_json:
        worst_micro = found.record.worst_micro + found.more_micro
        print_json({"endpoint": name, "ends_s": found.ends_s, "worst_case_usd": as_usd(worst_micro)})
    return 0
