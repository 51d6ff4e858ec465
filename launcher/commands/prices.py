"""`cloudtrain prices`: the prices of machines, the age of each price, and `refresh` to read the prices again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

from cloudtrain.entrypoints.format import counted

from .. import backend as backends
from ..errors import CloudtrainError, ConfigError, UsageError
from ..metering.rate import Key, age_days
from ..prices import refreshing
from ..prices.listing import PriceLine, PriceQuery, lines, why_none
from ..prices.refreshing import Change, priced
from ..text.tables import csv_text, table, width
from ..text.terminal import print_json, print_lines, print_text, say
from .options import DEFAULT_FILE, backend_option, file_option, flag, json_option

PLAIN = ("BACKEND", "TYPE", "HAS", "REGION", "HOW", "USD/H", "AT MOST", "AGE")
HEAD = ("COUNTED", "PER GPU", "TYPE", "HAS", "REGION", "HOW", "LISTED", "AGE", "OFF BY", "ORIGIN", "AS OF", "BACKEND")
DROPPED = ("AS OF", "BACKEND", "AGE", "ORIGIN", "OFF BY", "LISTED", "PER GPU", "HAS")  # if the terminal is narrow
CHANGES = ("BACKEND", "TYPE", "REGION", "HOW", "WAS", "IS", "CHANGE", "SOURCE, OR WHY NOT")
MANY = 40  # more new prices than this are counted, not listed
PERCENT = 0.0005  # a share; a smaller difference is no change of the price


@click.group("prices", invoke_without_command=True)
@backend_option(help="Only of this backend.")
@click.option(
    "--accelerators", "--accelerator", "accelerator", help="Of machines with these: A100:8, or A100 in any number."
)
@click.option("--region", help="Only in this region.")
@click.option("--type", "instance_type", help="Only of this machine type.")
@click.option("--spot/--on-demand", "is_spot", default=None, help="Only spot prices, or only prices on demand.")
@file_option("Of its machines.")
@flag("--all", "is_all", help="Of all machines, not only the config's.")
@flag("--wide", help="Show all columns: one GPU's price, what it is off by, origin, day.")
@flag("--csv", "as_csv", help="Print CSV instead of text.")
@json_option
@click.pass_context
def command(
    context: click.Context,
    backend: str | None,
    accelerator: str | None,
    region: str | None,
    instance_type: str | None,
    is_spot: bool | None,
    file: Path | None,
    is_all: bool,
    wide: bool,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Show what is known of machines' prices: US dollars for one machine and an hour.

    With a config file only its machines are shown, unless --all, a region, a type or the like is given. AT MOST is the
    sum that budgets count with (COUNTED with --wide), and the order: the price, and how much it may be too low. An old
    spot price counts as the price on demand. Of --wide's origins, `quoted` was found in a public place, `derived`
    follows from another figure by a rule, `read` comes from the vendor's own list by `cloudtrain prices refresh`; the
    sources are in --json and --csv.
    """
    if context.invoked_subcommand is not None:
        return
    _require(backend, accelerator)
    wanted = PriceQuery(backend, accelerator, region, instance_type, is_spot)
    is_filtered = is_all or any((backend, accelerator, region, instance_type))
    if file is None and not is_filtered and _has_a_list(Path(DEFAULT_FILE)):
        file = Path(DEFAULT_FILE)
    found = lines(wanted) if file is None else list(_of_config(file, wanted))
    if as_json:
        print_json({"prices": [line.dump() for line in found]})
    elif as_csv:
        print_lines(_csv(found))
    elif found:
        rows = [_row(line) if wide else _plain(line) for line in found]
        print_lines(table(HEAD if wide else PLAIN, rows, drop=DROPPED, shorten={"TYPE": 20}, columns=width()))
        column, others = "COUNTED" if wide else "AT MOST", "" if file is None else "; other machines: --all"
        notes = f"budgets count with {column}; sources: --json, --csv{others}; newer: cloudtrain prices refresh"
        say(f"{counted(len(found), 'price')}; {notes}")
    if not found and file is None:
        say(why_none(wanted))


def _has_a_list(file: Path) -> bool:
    """Return whether the file names a backend whose vendor publishes prices."""
    if not file.exists():
        return False
    from .. import config as configs

    try:
        return any(priced(name) is not None for name in configs.backends_configured(file))
    except ConfigError:  # with a faulty file, show all prices
        return False


def _of_config(file: Path, wanted: PriceQuery) -> Iterator[PriceLine]:
    """Yield the prices of the config's machines; print a line for each backend without a price."""
    lines(wanted)  # raises ConfigError for a damaged prices.csv, once instead of for each backend
    for target in refreshing.targets(file, None):
        cloud = priced(target.name)
        try:
            if target.error is not None or target.config is None or cloud is None:
                raise target.error or CloudtrainError("no config")
            capacity = backends.load(target.name).capacity(target.config)
            region = cloud.price_region(target.config)
        except CloudtrainError as error:
            say(f"{target.name}: {error.message}")
            continue
        there = lines(replace(wanted, backend=target.name, region=region, instance_type=capacity.machine))
        if not any(line.rate is not None for line in there):
            say(f"{target.name}: {capacity.price_source}")
        yield from there


def _require(backend: str | None, accelerator: str | None) -> None:
    """Raise ConfigError for an unknown backend, UsageError for faulty accelerators such as `A100:x`."""
    if backend is not None and backend not in backends.names():
        raise ConfigError(f"unknown backend `{backend}`", hint=backends.similar(backend))
    name, colon, count = (accelerator or "").partition(":")
    if accelerator is not None and (not name or (colon and not (count.isascii() and count.isdecimal()))):
        raise UsageError(f"`{accelerator}` names no accelerators", hint="as in A100:8, or A100")


def _row(line: PriceLine) -> list[str]:
    key, rate = line.key, line.rate
    age = None if rate is None else age_days(rate)
    return [
        _usd(line.counted_usd),
        _usd(line.each_usd),
        key.instance_type,
        f"{line.accelerator}:{line.count}" if line.count else line.accelerator or "-",
        key.region or "-",
        key.kind.replace("_", " "),
        _usd(None if rate is None else rate.usd),
        "-" if age is None else f"{age}d",
        f"{line.uncertainty - 1:.0%}",
        line.origin,
        "-" if rate is None else rate.when,
        key.backend,
    ]


def _plain(line: PriceLine) -> list[str]:
    usd, _, name, has, region, how, listed, age, *_ = _row(line)
    return [line.key.backend, name, has, region, how, listed, usd, age]


def _usd(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _csv(found: list[PriceLine]) -> list[str]:
    names = [*Key._fields, "accelerator", "count", "usd_per_hour", "counted_usd_per_hour"]
    names += ["counted_usd_per_accelerator_hour", "spot", "derived", "own"]
    names += ["uncertainty", "as_of", "age_days", "source"]
    rows = [line.dump() for line in found]
    return csv_text(names, [[row[name] for name in names] for row in rows]).splitlines()


@command.command("refresh")
@file_option("Of its backends.")
@backend_option(help="Only of this backend.")
@click.option("--region", "regions", multiple=True, help="In this region, not the config's or the environment's.")
@click.option("--type", "types", multiple=True, help="Of this machine type, with GPUs or without; repeatable.")
@json_option
def refresh_command(
    file: Path | None, backend: str | None, regions: tuple[str, ...], types: tuple[str, ...], as_json: bool
) -> int:
    """Read the prices again from the vendors' lists, and store them in prices.csv in cloudtrain's home.

    From then on they win over the package's table. AWS's and Azure's lists need no account, Google's needs a login.
    Exit code 4 without credentials, 7 where a vendor does not answer, 3 where it does not list what was asked for.
    """
    if file is None and Path(DEFAULT_FILE).exists():
        file = Path(DEFAULT_FILE)
    wanted = refreshing.targets(file, backend)
    if len(wanted) > 1 and (regions or types):
        names = ", ".join(target.name for target in wanted)
        raise UsageError("regions and types are one cloud's own", hint=f"say whose, by --backend: {names}")
    changes, damaged = refreshing.refresh(wanted, regions, types)
    if damaged is not None:
        say(f"prices.csv was damaged: its good lines are kept, all of it as it was lies in {damaged}")
    if as_json:
        print_json({"prices": [change.dump() for change in changes]})
    else:
        _show(changes)
    codes = [change.exit_code for change in changes if change.exit_code]
    is_all_lost = not any(change.quote.rate is not None for change in changes)
    is_asked = file is not None or backend is not None
    return codes[0] if codes and (is_all_lost or is_asked) else 0


def _show(changes: list[Change]) -> None:
    new = [change for change in changes if change.quote.rate is not None and change.old_usd is None]
    other = [change for change in changes if change.share is not None and abs(change.share) >= PERCENT]
    failed = [change for change in changes if change.quote.rate is None]
    shown = [*other, *(new if len(new) <= MANY else []), *(each for each in failed if each.quote.key.instance_type)]
    for quote in (change.quote for change in failed if not change.quote.key.instance_type):
        where = ", ".join(filter(None, (quote.key.backend, quote.key.region)))
        print_text([f"{where}: nothing was read: {quote.reason}; the prices known here stay in use"])
    if shown:
        print_lines(table(CHANGES, [_cells(change) for change in shown], below=CHANGES[-1], columns=width()))
    read = len(changes) - len(failed)
    say(f"{read} prices read: {len(other)} changed, {len(new)} new, {read - len(other) - len(new)} as before")


def _cells(change: Change) -> list[str]:
    key, rate = change.quote.key, change.quote.rate
    share = "new" if change.share is None else f"{change.share:+.1%}"
    return [
        key.backend,
        key.instance_type or "-",
        key.region or "-",
        key.kind.replace("_", " ") if key.instance_type else "-",
        _usd(change.old_usd),
        _usd(None if rate is None else rate.usd),
        "-" if rate is None else share,
        change.quote.reason if rate is None else rate.source,
    ]
