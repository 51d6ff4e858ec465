"""`cloudtrain backends`: what can be used."""

from __future__ import annotations

import click

from cloudtrain.launcher.backend import ANNOUNCED, names
from cloudtrain.launcher.options import json_option
from cloudtrain.launcher.terminal import print_json, print_lines

__all__ = ["command"]


@click.command("backends")
@json_option
def command(as_json: bool) -> None:
    """List the backends that this installation can use."""
    able = names()
    missing = [name for name in ANNOUNCED if name not in able]
    if as_json:
        print_json({"backends": able, "config_only": missing})
        return
    print_lines([*able, *(f"{name}  (its config block is checked; not part of this version)" for name in missing)])
