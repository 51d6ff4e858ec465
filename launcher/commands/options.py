"""Options that several commands share, and the config from the options."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ..backend_table import ALL, CHEAPEST
from ..errors import ConfigError, UsageError

if TYPE_CHECKING:
    from ..config.schema import JobConfig

DEFAULT_FILE = "cloudtrain.yaml"


class WholeNumber(click.IntRange):
    """A whole number in a range, by this name in click's messages."""

    name = "whole number"


F = TypeVar("F", bound=Callable[..., Any])


def reads(what: str) -> Callable[[click.Context, click.Parameter, str | None], int | None]:
    """Return the callback of an option that the function `what` of `text.units` reads, such as `parse_money`."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
        from ..text import units

        try:
            return None if value is None else int(getattr(units, what)(value))
        except ValueError as error:
            raise click.BadParameter(f"expected {error}", ctx, param) from None

    return read


def duration_s(option: str, text: str) -> int:
    """Return the seconds that an option's text means. Raises UsageError."""
    from ..text.units import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: expected {error}") from error


def completes(what: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return the completion by the function `what` of `completion.candidates`, imported only when a shell asks."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from ..completion import candidates

        found: list[CompletionItem] = getattr(candidates, what)(ctx, param, incomplete)
        return found

    return complete


price_option = click.option(
    "--price-per-hour",
    "price_micro",
    metavar="USD",
    callback=reads("parse_money"),
    help="What one instance costs an hour, in place of the price list.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=completes("settings"),
    help="Override a key; the value is YAML; repeatable.",
)
job_argument = click.argument("job", default="last", shell_complete=completes("jobs"))  # by default the newest job
named_job_argument = click.argument("job", shell_complete=completes("jobs"))
yes_option = click.option("-y", "--yes", is_flag=True, help="Answer every question with yes.")
everywhere_option = click.option(
    "--everywhere", is_flag=True, help="Remove the jobs' own folders on hosts and in buckets, too."
)


def examples(*lines: str) -> str:
    """Return a command's epilog: examples to type."""
    return "Examples:\n\n\b\n" + "\n".join(f"  {line}" for line in lines)


def file_option(use: str) -> Callable[[F], F]:
    """Return the option -f of a command that needs no config file; `use` says how the file is used."""
    help_text = f"{use}  [default: {DEFAULT_FILE}, if there]"
    return click.option("-f", "--file", type=click.Path(path_type=Path), help=help_text)


def price_setting(backend: str, price_micro: int) -> str:
    """Return the setting of the price of the backend's machines."""
    from ..text.units import format_money

    return f"{backend}.price_per_hour={format_money(price_micro)}"


def require_one_budget(settings: Sequence[str]) -> None:
    """Raise UsageError if a setting limits the cost of the job in addition to `--budget`."""
    keys = [setting.partition("=")[0].strip() for setting in settings]
    if beside := [key for key in keys if key in ("budget", "budget.limit")]:
        raise UsageError(f"--budget and --set {beside[0]} both say what the job may cost", hint="give one of them")


@dataclass(frozen=True)
class Overrides:
    """The overrides of the file from the command line."""

    file: Path
    backend: str | None
    settings: tuple[str, ...]
    price_micro: int | None = None

    def load(self, backend: str | None = None) -> JobConfig:
        """Return the config for a single backend. Raises ConfigError with every fault, and if several are named."""
        from .. import config
        from ..planning.prepare import refused

        chosen = backend or self.backend
        return config.load(self.file, backend=chosen, overrides=self.assignments(chosen), further=refused)

    def assignments(self, backend: str | None) -> tuple[str, ...]:
        """Return the settings, with the price of the backend's machines. Raises ConfigError."""
        from .. import config

        if self.price_micro is None:
            return self.settings
        name = backend or config.backends_asked(self.file, self.settings)[0]
        return (*self.settings, price_setting(name, self.price_micro))

    def named(self, name: str) -> Overrides:
        """Return the overrides with the name, if the config has no name. Raises ConfigError for an unreadable file."""
        from .. import config

        is_missing = config.written(self.file, ("name",), self.settings) is None
        return replace(self, settings=(*self.settings, f"name={json.dumps(name)}")) if is_missing else self

    def compares(self) -> bool:
        """Return whether the options name several backends, or can mean several. Raises ConfigError, UsageError."""
        is_many = self.backend in (ALL, CHEAPEST) or len(self.backends()) > 1
        if is_many and self.price_micro is not None:
            hint = "add --backend NAME, or set each one's `price_per_hour` in the file"
            raise UsageError("--price-per-hour is the price of one backend's machines", hint=hint)
        return is_many

    def backends(self) -> tuple[str, ...]:
        """Return the chosen backends in the order of their names. Raises ConfigError; UsageError without a name.

        `all`: each backend that the file configures; `cheapest`: the backends in the file's list, else all.
        """
        from .. import config

        if self.backend is not None and self.backend not in (ALL, CHEAPEST):
            names = tuple(dict.fromkeys(name.strip() for name in self.backend.split(",") if name.strip()))
            if not names:
                raise UsageError("--backend needs a name", hint="cloudtrain backends")
            return _known(names)
        listed = _known(config.backends_asked(self.file, self.settings))
        is_all = self.backend == ALL or (self.backend == CHEAPEST and len(listed) == 1)
        return config.backends_configured(self.file, self.settings) if is_all else listed

    def words(self, backend: str) -> str:
        """Return the options of a command for the same job on the backend, quoted for a shell."""
        file = [] if str(self.file) == DEFAULT_FILE else ["-f", str(self.file)]
        return shlex.join([*file, "--backend", backend, *(word for each in self.settings for word in ("--set", each))])

    def placing(self) -> AbstractContextManager[None]:
        """Add the place in the file to the errors of the block."""
        from .. import config

        return config.placing(self.file, self.settings)


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names. An unknown name among several raises ConfigError: a table's row would hide the error."""
    if len(names) == 1:
        return names
    from .. import backend

    for name in names:
        if name in (ALL, CHEAPEST):
            raise UsageError(f"`{name}` is no backend's name: use it alone, as in --backend {name}")
        if name not in backend.BUILT_IN and name not in backend.names():  # plug-ins are looked for last
            raise ConfigError(f"unknown backend `{name}`", hint=backend.similar(name))
    return names


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose and override a config file; the command gets an `Overrides` as its first argument."""

    @functools.wraps(command)
    def with_overrides(
        file: Path,
        given: Path | None,
        backend: str | None,
        instances: int | None,
        accelerators: str | None,
        instance_type: str | None,
        spot: bool | None,
        settings: tuple[str, ...],
        price_micro: int | None,
        budget_micro: int | None,
        **rest: Any,
    ) -> Any:
        file = _one_file(file, given, settings)
        # The typed options become settings, and win over `--set`.
        typed = [f"resources.instances={instances}"] if instances is not None else []
        if budget_micro is not None:
            from ..text.units import format_money

            require_one_budget(settings)
            typed.append(f"budget.limit={format_money(budget_micro)}")
        if accelerators is not None and instance_type is not None:
            message = "--accelerators and --instance-type both name the machines"
            raise UsageError(message, hint="give one of them: an instance type has its own accelerators")
        if accelerators is not None:
            typed += [f"resources.accelerators={json.dumps(accelerators)}", "resources.instance_type=null"]
        if instance_type is not None:
            typed += [f"resources.instance_type={json.dumps(instance_type)}", "resources.accelerators=null"]
        if spot is not None:
            typed.append(f"resources.spot={str(spot).lower()}")
        if backend == "":
            raise UsageError("--backend needs a name", hint="cloudtrain backends")
        return command(Overrides(file, backend, (*settings, *typed), price_micro), **rest)

    for option in reversed(_CONFIG_OPTIONS):
        with_overrides = option(with_overrides)
    return with_overrides


def _one_file(file: Path, given: Path | None, settings: Sequence[str]) -> Path:
    """Return the config file of -f or of FILE. Raises UsageError for a script, half a setting, or two files."""
    if given is None:
        return file
    if settings and given.name.endswith(("]", "}")) and not given.exists():
        key = settings[-1].partition("=")[0]
        hint = f"quote the value: --set '{key}=...'"
        raise UsageError(f"the shell has split the value of `{key}` at a space: `{given}` is the rest", hint=hint)
    if click.get_current_context().get_parameter_source("file") is click.core.ParameterSource.COMMANDLINE:
        raise UsageError(f"`{given}` and `-f {file}` name two config files", hint="give one of them")
    if given.suffix in (".py", ".sh"):
        hint = f"`cloudtrain init --kind script` writes a config file; its key is `script: {given}`"
        raise UsageError(f"`{given}` is a script, and a job is described by a config file", hint=hint)
    return given


_CONFIG_OPTIONS = (
    click.argument("given", required=False, metavar="[FILE]", type=click.Path(path_type=Path)),
    click.option(
        "-f",
        "--file",
        default=DEFAULT_FILE,
        type=click.Path(path_type=Path),
        show_default=True,
        help="The config file, as FILE does.",
    ),
    click.option(
        "--backend",
        metavar="NAME",
        shell_complete=completes("backends_and_all"),
        help="Override backend. Several: names with commas, `all` that the file has, or `cheapest`.",
    ),
    click.option("--instances", type=WholeNumber(min=1), metavar="N", help="Override resources.instances."),
    click.option("--accelerators", metavar="TYPE:N", help="Override resources.accelerators, as in A100:8."),
    click.option("--instance-type", metavar="NAME", help="Override resources.instance_type."),
    click.option("--spot/--no-spot", default=None, help="Override resources.spot."),
    set_option,
    price_option,
    click.option(
        "--budget",
        "budget_micro",
        metavar="USD",
        callback=reads("parse_money"),
        help="Most the job may cost, all attempts together: budget.limit.",
    ),
)
