"""Options that several commands share, and the config they lead to."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cloudtrain.launcher.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import Config

__all__ = ["DEFAULT_FILE", "Overrides", "config_options", "job_argument", "json_option", "yes_option"]

DEFAULT_FILE = "cloudtrain.yaml"

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
yes_option = click.option("-y", "--yes", is_flag=True, help="Answer every question with yes.")


def job_argument(command: F) -> F:
    """Add the JOB argument, with live completion."""
    return click.argument("job", shell_complete=_complete_job)(command)


@dataclass(frozen=True)
class Overrides:
    """The command line's say over the file."""

    file: Path
    backend: str | None
    settings: tuple[str, ...]

    def load(self, backend: str | None = None) -> Config:
        """Return the config. Raises ConfigError with every fault."""
        from cloudtrain.launcher import config

        return config.load(self.file, backend=backend or self.backend, overrides=self.settings)

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Give what the block refuses its place in the file."""
        try:
            yield
        except ConfigError as error:
            from cloudtrain.launcher import config

            raise (config.placed(error, self.file, self.settings) if not error.where else error) from error


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose a config file and override it; the command gets them as one `Overrides`, first."""

    @functools.wraps(command)
    def with_overrides(
        file: Path,
        backend: str | None,
        instances: int | None,
        instance_type: str | None,
        spot: bool | None,
        settings: tuple[str, ...],
        **rest: Any,
    ) -> Any:
        # The typed options become settings, and beat `--set`.
        typed = [f"resources.instances={instances}"] if instances is not None else []
        if instance_type is not None:
            typed += [f"resources.instance_type={json.dumps(instance_type)}", "resources.accelerators=null"]
        if spot is not None:
            typed.append(f"resources.spot={str(spot).lower()}")
        if backend == "":
            raise UsageError("--backend needs a name", hint="cloudtrain backends")
        return command(Overrides(file, backend, (*settings, *typed)), **rest)

    for option in reversed(_CONFIG_OPTIONS):
        with_overrides = option(with_overrides)
    return with_overrides


_CONFIG_OPTIONS = (
    click.option("-f", "--file", default=DEFAULT_FILE, type=click.Path(path_type=Path), show_default=True),
    click.option("--backend", help="Override backend; `all`, for a dry run: every backend that the file configures."),
    click.option("--instances", type=click.IntRange(min=1), help="Override resources.instances."),
    click.option("--instance-type", help="Override resources.instance_type."),
    click.option("--spot/--no-spot", default=None, help="Override resources.spot."),
    click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key; the value is YAML."),
)


def _complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from cloudtrain.launcher.registry import Registry

    try:
        return [job.id for job in Registry().jobs(limit=200) if job.id.startswith(incomplete)]
    except Exception:
        return []  # completion must never print an error into the user's prompt
