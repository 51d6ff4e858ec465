"""`cloudtrain backends`: what can be used."""

from __future__ import annotations

import click

from cloudtrain.launcher.backend import ANNOUNCED, RENDERED, names
from cloudtrain.launcher.options import json_option
from cloudtrain.launcher.terminal import print_json, print_lines

__all__ = ["command"]


@click.command("backends")
@json_option
def command(as_json: bool) -> None:
    """List the backends that this installation can use."""
    able, known = names(), names(dry=True)  # each reads every installed package's entry points
    missing = [name for name in ANNOUNCED if name not in known]
    if as_json:
        print_json({"backends": able, "dry_run_only": list(RENDERED), "config_only": missing})
        return
    dry = [f"{name}  (plan and dry run; sending is not part of this version)" for name in RENDERED]
    print_lines(
        [*able, *dry, *(f"{name}  (its config block is checked; not part of this version)" for name in missing)]
    )
