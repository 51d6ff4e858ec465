"""`cloudtrain completion`: the completion script of a shell."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

import click

from ..completion import SHELLS, installed_at
from ..errors import UsageError
from ..text.terminal import print_lines, say
from .options import flag


@click.command(
    "completion",
    epilog="In a start-up file: `source <(cloudtrain completion bash)`, the same with zsh; with fish: "
    "`cloudtrain completion fish | source`.",
)
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@flag("--install", help="Write it to where the shell looks for it, and say where that is.")
def command(shell: str | None, install: bool) -> None:
    """Print a shell's completion script, or install it; the shell is $SHELL's where none is named.

    TAB then completes commands, options, jobs (the newest first), attempts, backends and keys of the config, from this
    machine's own files alone.
    """
    chosen = shell or Path(os.environ.get("SHELL", "")).name
    if chosen not in SHELLS:
        raise UsageError(f"which shell? $SHELL is `{chosen}`", hint=f"cloudtrain completion {' | '.join(SHELLS)}")
    script = (files("cloudtrain.templates") / "completion" / f"cloudtrain.{chosen}").read_text(encoding="utf-8")
    if not install:
        print_lines([script.rstrip("\n")])
        return
    place = installed_at(chosen)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(script, encoding="utf-8")
    except OSError as error:
        hint = f"source <(cloudtrain completion {chosen}), in your shell's start-up file"
        raise UsageError(f"cannot write {place}: {error.strerror}", hint=hint) from error
    first_use = {
        "bash": f"new shells that load the package bash-completion find it; else add to ~/.bashrc: source {place}",
        "zsh": f"before `compinit` in ~/.zshrc it needs: fpath=({place.parent} $fpath)",
    }
    say(f"wrote {place}\n{first_use.get(chosen, 'new shells find it')}")
