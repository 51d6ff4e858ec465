"""`cloudtrain undeploy`: an endpoint is deleted before its end."""

from __future__ import annotations

import time

import click

from cloudtrain.entrypoints.format import dollars

from ..text.terminal import print_json, say
from .options import examples, json_option


@click.command("undeploy", epilog=examples("cloudtrain undeploy digits-a1b2c"))
@click.argument("name")
@json_option
def command(name: str, as_json: bool) -> None:
    """Delete an endpoint now, with its configuration and its scheduled end, and settle its cost."""
    from ..models import deploying
    from ..money import endpoints as costs
    from ..store.registry import Registry

    record, now_s = deploying.undeploy(Registry(), name), time.time()
    if as_json:
        print_json(costs.as_json(record, now_s))
        return
    cost = dollars(record.spent_micro(now_s))
    if record.state == "gone":
        say(f"{name} is gone; it has cost at most {cost} by the price list")
    else:
        say(f"{name} is being deleted ({record.word}): cloudtrain list shows its end")
