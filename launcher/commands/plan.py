"""`cloudtrain plan`: the plan of a job, without a submit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..advice.preparing import prepare
from ..errors import ConfigError, Fault
from ..text import visible
from ..text.tables import width, wrapped
from ..text.terminal import print_json, print_lines, print_text, say
from .options import Overrides, config_command, config_options, flag, json_option

if TYPE_CHECKING:
    from ..jobs.compare import BackendOffer


@config_command("plan", "cloudtrain plan --backend all", "cloudtrain plan --backend vertex --accelerators A100:8")
@config_options
@flag("--no-code", "without_code", help="Run no code of the task here: no memory, no comparison with a parent.")
@json_option
def command(overrides: Overrides, without_code: bool, as_json: bool) -> int:
    """Show ranks, batch split, time limit and price; sends nothing.

    The memory of a task is measured by its own code on this machine, without the variables that may hold keys.

    Of several backends (`--backend all`, `--backend sagemaker,vertex`, or a list in the file) it shows a table, the
    cheapest hour first.
    """
    if overrides.compares():
        return _compare(overrides, as_json=as_json)
    config = overrides.load()
    with overrides.placing():
        prepared = prepare(config, overrides.file, Path(), dry=True)
    config = prepared.config  # of the first candidate
    from ..advice import memory, methods, parents
    from ..money.budget_preview import books_of
    from ..planning.bundle import size_words, summary
    from ..planning.prepare import after_loss
    from ..planning.prepared import candidates_of

    books, worst_micro = books_of(config), prepared.plan.most_micro
    parent, difference = list[str](), None
    try:
        with overrides.placing():
            parent = [] if without_code else parents.compared(prepared)
    except ConfigError as error:
        if as_json:
            raise
        difference = error  # for the end of the plan
    with overrides.placing():
        needed = memory.of_plan(prepared, measures=not without_code)
    loss = after_loss(prepared)
    if as_json:
        shown = {"backend": config.backend, **prepared.plan.dump(), "bundle": prepared.bundle.dump(), "memory": needed}
        shown |= {"budgets": books.dump(worst_micro), "parent": parent[0] if parent else None, "machine_loss": loss}
        shown |= {"candidates": tried} if (tried := candidates_of(prepared)) else {}
        print_json(shown)
        return 0
    listed = ", ".join(f"{name} {size_words(size)}" for name, size in prepared.bundle.largest[:3])
    largest = visible.shown(listed, colour=False)
    code = f"code: {summary(prepared.bundle)}"
    lines = [f"{line}; largest: {largest}" if line == code else line for line in prepared.lines()]
    lines += [*filter(None, [loss]), *parent, *([memory.line(needed), *needed["notes"]] if needed else [])]
    if config.sweep is not None:
        from ..sweeps.overview import plan_lines

        lines += plan_lines(config.model_dump(mode="json"), prepared.plan)
    lines += [advice] if (advice := methods.advice(config, prepared.plan.ranks)) else []
    print_text([*lines, *books.lines(worst_micro)])
    if difference is not None:
        raise difference
    return 0


def _compare(overrides: Overrides, *, as_json: bool) -> int:
    from ..jobs import compare  # with the config's models
    from ..planning import images

    found = compare.offers(overrides.load, overrides.backends(), overrides.file)
    if all(offer.error or offer.lacks for offer in found):
        with overrides.placing():
            _require_known(found)
    first = compare.cheapest(found)
    if as_json:
        print_json({"backends": [offer.dump() for offer in found], "cheapest": first.backend if first else None})
    else:
        columns = width() or compare.COLUMNS
        made = ((offer.backend, offer.prepared.request.runtime) for offer in found if offer.prepared)
        runtimes = [f"{backend}: {images.line(runtime)}" for backend, runtime in made if runtime and runtime.torch]
        below = wrapped([*runtimes, *compare.unlike(found), *compare.refused(found)], columns)
        print_lines([*compare.lines(found, columns), *below])
        say(_below(first, found, overrides))
    is_planned = bool(_capable(found)) or all(offer.prepared for offer in found)
    return 0 if is_planned else ConfigError.exit_code


def _require_known(found: list[BackendOffer]) -> None:
    """Raise ConfigError if no backend's price list has the accelerators."""
    from ..prices import catalog

    wanted = next((offer.prepared.config.resources.accelerators for offer in found if offer.prepared), None)
    if wanted and (message := catalog.unknown(wanted)):
        raise ConfigError([Fault(message, key="resources.accelerators", hint="`cloudtrain prices` lists machines")])


def _below(first: BackendOffer | None, found: list[BackendOffer], overrides: Overrides) -> str:
    """Return the line below the table: how to choose a backend, or the reason that no choice is possible."""
    if len(found) == 1 and found[0].prepared:
        return f"only `{found[0].backend}` is configured: add another backend's block to compare"
    unknown = [offer.backend for offer in found if offer.unknown_region]
    if first is not None and not first.unknown_region:
        return f"cheapest by the hour, of the known prices: cloudtrain submit {overrides.words(first.backend)}"
    names = [name for name in _capable(found) if name not in unknown]
    if names and first is None:
        setting = f"set {names[0]}.price_per_hour, or choose by `cloudtrain submit {overrides.words(names[0])}`"
        return f"no price is known of {', '.join(names)}: {setting}"
    if unknown:
        return f"the region of {', '.join(unknown)} is unknown: correct the region, and plan again"
    lacking = [offer.prepared.config.resources.accelerators for offer in found if offer.prepared]
    wanted = f" with `accelerators: {lacking[0]}`" if lacking else ""
    return f"no backend can be planned{wanted}: `cloudtrain plan {overrides.words('NAME')}` shows all problems"


def _capable(found: list[BackendOffer]) -> list[str]:
    """Return the backends with a plan for machines that have the requested GPUs."""
    return [offer.backend for offer in found if offer.prepared and not offer.lacks]
