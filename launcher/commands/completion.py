"""`cloudtrain completion`: the script that a shell sources."""

from __future__ import annotations

import click

__all__ = ["command"]


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the shell's completion script, job names included: `source <(cloudtrain completion bash)`."""
    from click.shell_completion import get_completion_class

    from cloudtrain.launcher.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "cloudtrain", "_CLOUDTRAIN_COMPLETE").source())
