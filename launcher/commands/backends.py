"""`cloudtrain backends`: the backends of this installation."""

from __future__ import annotations

import click

from ..backend_table import names
from ..text.terminal import print_json, print_lines
from .options import json_option


@click.command("backends")
@json_option
def command(as_json: bool) -> None:
    """List the backends that this installation can use."""
    if as_json:
        print_json({"backends": names()})
        return
    print_lines(names())
