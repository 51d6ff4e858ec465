"""Options that several commands share, and the config from the options."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ..backend_table import ALL, BUILT_IN, CHEAPEST
from ..errors import ConfigError, UsageError
from ..text.terminal import say, say_each

if TYPE_CHECKING:
    from ..config.launch_line import Program
    from ..config.schema import JobConfig

DEFAULT_FILE = "cloudtrain.yaml"
_SCRIPTS = (".sh", ".sbatch", ".slurm")  # of a shell or of Slurm
LAUNCHER = re.compile(
    r"(.*/)?(python[\d.]*|torchrun|accelerate|deepspeed|srun|sbatch|salloc|qsub|mpirun|mpiexec|bash|sh|"
    rf"[^/]+({'|'.join(map(re.escape, _SCRIPTS))}))"
)
_ARGS = "cloudtrain.args"  # key in the meta of click's context: the words after `--`
_OF_PROGRAMS = ("task", "script", "module", "args", "resume_args", "training", "params", "evaluate", "sweep")


class WholeNumber(click.IntRange):
    """A whole number in a range, by this name in click's messages."""

    name = "whole number"


class _ConfigCommand(click.Command):
    """Keeps the words after `--` apart from FILE."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- ARGS]"]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[_ARGS] = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)


F = TypeVar("F", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
flag = functools.partial(click.option, is_flag=True)
path_option = functools.partial(click.option, type=PATH)
count_option = functools.partial(click.option, type=WholeNumber(min=1))


def examples(*lines: str) -> str:
    """Return a command's epilog: examples to type."""
    return "Examples:\n\n\b\n" + "\n".join(f"  {line}" for line in lines)


def cli_command(name: str, *typed: str, cls: type[click.Command] = click.Command) -> Callable[..., click.Command]:
    """Return the decorator of a command, whose help ends with examples to type."""
    return click.command(name, cls=cls, epilog=examples(*typed) if typed else None)


config_command = functools.partial(cli_command, cls=_ConfigCommand)  # of a command with `config_options`


def reads(what: str) -> Callable[[click.Context, click.Parameter, str | None], int | None]:
    """Return the callback of an option that the function `what` of `text.units` reads, such as `parse_money`."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
        from ..text import units

        try:
            return None if value is None else int(getattr(units, what)(value))
        except ValueError as error:
            raise click.BadParameter(f"`{value}`: expected {error}", ctx, param) from None

    return read


duration_option = functools.partial(click.option, metavar="DURATION", callback=reads("parse_duration"))


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
json_option = flag("--json", "as_json", help="Print JSON instead of text.")
backend_option = functools.partial(click.option, "--backend", shell_complete=completes("backends"))
set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=completes("settings"),
    help="Override a key; the value is YAML; repeatable.",
)
job_argument = click.argument("job", default="last", shell_complete=completes("jobs"))  # by default the newest job
required_job = click.argument("job", shell_complete=completes("jobs"))
yes_option = flag("-y", "--yes", help="Answer every question with yes.")
everywhere_option = flag("--everywhere", help="Remove the jobs' own folders on hosts and in buckets, too.")


def file_option(use: str) -> Callable[[F], F]:
    """Return the option -f of a command that needs no config file; `use` says how the file is used."""
    help_text = f"{use}  [default: {DEFAULT_FILE}, if there]"
    return path_option("-f", "--file", help=help_text)


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
        file, settings = [] if str(self.file) == DEFAULT_FILE else ["-f", str(self.file)], self.settings
        if settings[1:] and settings[1].startswith("script=") and not self.file.exists():  # of a script without a file
            file, settings = [json.loads(settings[1][7:])], settings[2:]
        return shlex.join([*file, "--backend", backend, *(word for each in settings for word in ("--set", each))])

    def as_yaml(self) -> str:
        """Return the config file of a job without one; `${NAME}` stays, and stands in place of a secret in `env`."""
        import yaml

        from .. import config
        from ..config.yamlfile import SECRET_NAME

        backend = [f"backend={self.backend}"] if self.backend and not self.compares() else []
        pairs = [each.partition("=")[::2] for each in (*self.assignments(self.backend), *backend)]
        is_secret = {key for key, _ in pairs if key.startswith("env.") and SECRET_NAME.search(key)}
        typed = [
            f"{key}={'$${' + key[4:] + '}' if key in is_secret else text.replace('${', '$${')}" for key, text in pairs
        ]
        data = config.written(self.file, (), typed)
        dump = functools.partial(yaml.safe_dump, default_flow_style=True, allow_unicode=True, width=1_000_000)
        return "".join(f"{key}: {str(dump([value]))[1:-2]}\n" for key, value in data.items() if value not in ([], {}))

    def placing(self) -> AbstractContextManager[None]:
        """Add the place in the file to the errors of the block."""
        from .. import config

        return config.placing(self.file, self.settings)


def _of_others(overrides: Overrides, settings: Sequence[str]) -> Iterator[str]:
    """Yield a note on each setting for a backend that the job is not sent to. Raises as `backends` does."""
    keys = [setting.partition("=")[0] for setting in settings if setting.partition(".")[0] in BUILT_IN]
    if not keys:
        return
    from .. import config

    if config.written(overrides.file, ("capacity",), overrides.settings) is None:
        chosen = overrides.backends()
        for key in keys:
            if (block := key.partition(".")[0]) not in chosen:
                yield f"ignored on {', '.join(chosen)}: {key}; --backend {block} takes it"


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
        settings: tuple[str, ...],
        price_micro: int | None,
        budget_micro: int | None,
        save: bool,
        **rest: Any,
    ) -> Any:
        words = click.get_current_context().meta.get(_ARGS)
        file, program = _named(file, given, words, settings)
        # The typed options become settings, and win over `--set`.
        machines = {name: rest.pop(name) for name in ("instances", "accelerators", "instance_type", "spot")}
        typed = [f"resources.{name}={json.dumps(value)}" for name, value in machines.items() if value is not None]
        chosen = [name for name in ("accelerators", "instance_type") if machines[name] is not None]
        if len(chosen) == 2:
            message = "--accelerators and --instance-type both name the machines"
            raise UsageError(message, hint="give one of them: an instance type has its own accelerators")
        if chosen and file.exists():  # in place of the file's
            typed.append(f"resources.{'instance_type' if chosen == ['accelerators'] else 'accelerators'}=null")
        if budget_micro is not None:
            from ..text.units import format_money

            require_one_budget(settings)
            typed.append(f"budget.limit={format_money(budget_micro)}")
        if backend == "":
            raise UsageError("--backend needs a name", hint="cloudtrain backends")
        if (words := words if program is None else program.args) is not None:
            typed.append(f"args={json.dumps(words, ensure_ascii=False)}")
        if program is None and words is not None:
            from .. import config

            if file.exists() and config.written(file, ("args",), settings) is not None:
                say(f"{file} is used, with these arguments in place of its `args`")
        if program is None and save:
            hint = (
                f"write them under `args` in {file}" if words and file.exists() else "cloudtrain submit train.py --save"
            )
            raise UsageError("--save writes the config of a script", hint=hint)
        overrides = Overrides(file, backend, (*settings, *typed), price_micro)
        if program is not None:
            overrides = _with_program(overrides, program, save=save)
        say_each(_of_others(overrides, settings))
        return command(overrides, **rest)

    for option in reversed(_CONFIG_OPTIONS):
        with_overrides = option(with_overrides)
    return with_overrides


def _named(
    file: Path, given: Path | None, words: Sequence[str] | None, settings: Sequence[str]
) -> tuple[Path, Program | None]:
    """Return the config file, and the program of SCRIPT or of the words behind `--`. Raises UsageError."""
    script = [str(given)] if given is not None and given.suffix in (".py", ".ipynb", *_SCRIPTS) else []
    first = words[0] if words else "-"
    is_line = LAUNCHER.fullmatch(first) or not (given or first.startswith("-") or file.exists())
    if given is not None and not script:
        if settings and given.name.endswith(("]", "}")) and not given.exists():
            key = settings[-1].partition("=")[0]
            hint = f"quote the value: --set '{key}=...'"
            raise UsageError(f"the shell has split the value of `{key}` at a space: `{given}` is the rest", hint=hint)
        if click.get_current_context().get_parameter_source("file") is click.core.ParameterSource.COMMANDLINE:
            raise UsageError(f"`{given}` and `-f {file}` name two config files", hint="give one of them")
        file = given
    if script and is_line:
        raise UsageError(f"`{given}` and `{shlex.join(words or ())}` are two programs", hint="give one of them")
    if not script and not is_line:
        return file, None
    from ..config import launch_line

    program = launch_line.read([*script, *(words or ())])
    return file, program._replace(args=None) if words is None else program


def _with_program(overrides: Overrides, program: Program, *, save: bool) -> Overrides:
    """Return the overrides with this program in place of the file's, or as the whole config if there is no file."""
    from .. import config
    from ..job import name_of

    file, name, own = overrides.file, program.name, dict[str, Any]()
    is_there = file.exists() and not save
    if is_there:
        found = config.written(file, ())
        own = found if isinstance(found, dict) else {}
    if program.key == "script":  # the config has the path below the code folder
        code = config.written(file, ("code", "dir")) if is_there else None
        name = Path(os.path.relpath(name, file.parent / str(code or "."))).as_posix()
    say_each(filter(None, [program.note]))
    settings = (f"{program.key}={json.dumps(name)}", *program.settings)
    if is_there:
        is_other, has_args = own.get(program.key) != name, program.args is not None
        gone = [key for key in _OF_PROGRAMS if key in own and (is_other or (key == "args" and has_args))]
        place = f" in place of its {', '.join(f'`{key}`' for key in gone)}" if gone else ""
        say(f"{file} is used, with `{program.key}: {name}`{' and these arguments' * has_args}{place}")
        nulls = (f"{key}=null" for key in gone if key != program.key)
        return replace(overrides, settings=(*nulls, *settings, *overrides.settings))
    packages = ["requirements=requirements.txt"] if Path("requirements.txt").is_file() else []
    overrides = replace(overrides, settings=(f"name={name_of(Path())}", *settings, *packages, *overrides.settings))
    text = overrides.as_yaml()
    if not file.exists():
        say(f"no {DEFAULT_FILE} here: the job has this config{'' if save else ', and --save writes it'}")
    elif file.read_text(encoding="utf-8") == text:
        say(f"{file} has this config already")
    else:
        raise UsageError(f"{file} exists, and is not replaced", hint="leave --save out, or rename the file")
    say_each(f"  {line}" for line in text.splitlines())
    if not save:
        return overrides
    overrides.load(overrides.backends()[0])
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror or error}") from error
    return Overrides(file, overrides.backend if overrides.compares() else None, ())


_CONFIG_OPTIONS = (
    click.argument("given", required=False, metavar="[FILE|SCRIPT]", type=PATH),
    path_option("-f", "--file", default=DEFAULT_FILE, show_default=True, help="The config file, as FILE does."),
    click.option(
        "--backend",
        metavar="NAME",
        shell_complete=completes("backends_and_all"),
        help="Override backend. Several: names with commas, `all` that the file has, or `cheapest`.",
    ),
    count_option("--instances", metavar="N", help="Override resources.instances."),
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
    flag("--save", help=f"Of a SCRIPT without a file: write its config as {DEFAULT_FILE}."),
)
