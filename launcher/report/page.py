"""The report as a single HTML file without external requests: styles, script and data are included.

Text from a job is inserted as text, escaped by the template, or as JSON without any `<`; and the page's own policy
allows only our scripts, identified by their hashes. The file is written privately, and shown in the browser.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints import atomic_json

from ..errors import UsageError
from ..job import Job
from ..jobs import shown_config
from ..jobs.evaluations import Tested, headline, quantiles, tests_of
from ..jobs.view import view_of
from ..planning.render import environment
from ..planning.shipped import GENERATOR, is_report
from ..store import series as serieses
from ..store import tries
from ..store.registry import Registry
from ..text.terminal import confirm, is_terminal, say
from ..text.units import moment
from . import comparing, facts
from .comparing import Comparison
from .data import chart_data

if TYPE_CHECKING:
    from jinja2 import Template

_SCRIPTS, _STYLES = ("charts.js", "page.js"), ("charts.css", "report.css")
CELL, SIDE, EDGE = 34, 260, 46  # of a cell of the matrix, of the calibration's square, of the axes
_MOST_CLASSES = 30  # in a matrix that a reader can read
_FAINTEST = 0.12
_WHICH, _COMPARED = ("checkpoint", "step", "weights"), ("accuracy", "loss", "macro_f1", "mae", "rmse", "r2")


def report_html(registry: Registry, job: Job, now_s: float) -> str:
    """Return the report of a job, as known at `now_s`."""
    view, series = view_of(job, registry.attempts(job), now_s), serieses.read(registry.database, job.id)
    data = chart_data(view, serieses.drawable(series))
    summary, saved = facts.checkpoints(series)
    return rendered(
        "report.html",
        [data],
        title=f"{job.id}: {data['job']['state']}",
        job=job,
        data=data,
        as_of=f"{moment(now_s)} UTC",
        cards=list(facts.headline(view, series)),
        failures=list(facts.failures(view)),
        attempts=list(facts.attempt_rows(data["attempts"])),
        tries=[tries.HEAD, *(each.cells for each in view.tries)],
        checkpoints=saved,
        checkpoints_summary=summary,
        plan=list(facts.plan_rows(view)),
        environment=list(facts.environment(job, series)),
        code=list(facts.code(job, series)),
        commands=list(facts.commands(view)),
        config=shown_config.as_yaml(shown_config.shown(job)),
        tests=tests_section(tests_of(registry, job)),
        cell=CELL,
        side=SIDE,
        edge=EDGE,
    )


def comparison_html(found: Comparison, now_s: float) -> str:
    """Return the page with the jobs' curves in the same charts."""
    names = [job.id for job in found.jobs]
    return rendered(
        "compare.html",
        found.drawn,
        title=f"compared: {', '.join(names)}",
        heading=", ".join(names) if len(names) <= 3 else f"{len(names)} jobs compared",
        as_of=f"{moment(now_s)} UTC",
        names=names,
        running=[job.id for job in found.jobs if job.active],
        results=comparing.rows(found),
        differences=[(key, [comparing.value_text(each) for each in values]) for key, values in found.config.items()],
        crossing=comparing.crossing_words(found),
    )


def rendered(template: str, datas: Sequence[dict[str, Any]], **values: Any) -> str:
    """Return a template of templates/report, rendered with the values and with the charts of `datas`."""
    from markupsafe import Markup

    scripts, styles = [_source(name) for name in _SCRIPTS], [_source(name) for name in _STYLES]
    sources = f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; img-src data:"
    policy = f"{sources}; base-uri 'none'; form-action 'none'"
    parts = {"scripts": [Markup(script) for script in scripts], "styles": [Markup(style) for style in styles]}
    charts = Markup(_json(datas))
    text = _template(template).render(generator=GENERATOR, policy=policy, charts=charts, **parts, **values)
    return text.encode("utf-8", "replace").decode()  # replace lone surrogates, which a job can print in JSON


def _json(value: Any) -> str:
    """Return JSON that is safe in a script element, for any text in the value."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hashes(texts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


@functools.cache
def _template(name: str) -> Template:
    return environment("report", autoescape=True).get_template(name)


def _source(name: str) -> str:
    return files("cloudtrain.templates").joinpath("report").joinpath(name).read_text(encoding="utf-8")


def require_free(path: Path, *, force: bool) -> None:
    """Ask before replacing a file that is not a report. Raises UsageError if refused or impossible to ask."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint=f"name a file: -o {path / 'report.html'}")
    if not path.exists():
        return
    if not path.is_file():  # never replace a pipe or a device; reading from either may never end
        raise UsageError(f"{path} is not a file", hint="name a file; --json prints what is in it")
    if force:
        return
    try:
        if is_report(path):
            return
    except OSError as error:
        hint = "name another file: -o"
        raise UsageError(f"{path} is there and cannot be read: {error.strerror}", hint=hint) from error
    if not is_terminal():
        hint = "name another file with -o, or add --force"
        raise UsageError(f"{path} exists and is not a cloudtrain report", hint=hint)
    if not confirm(f"{path} is not a cloudtrain report; replace it?", yes=False):
        raise UsageError(f"{path} was left as it is", hint="name another file: -o")


def write(path: Path, text: str) -> None:
    """Write the file, completely or not at all. Raises UsageError if the file cannot be written."""
    try:
        atomic_json.write_text(path, text)
    except OSError as error:
        hint = "name a file in a folder that is there and can be written to: -o"
        raise UsageError(f"{path} cannot be written: {error.strerror}", hint=hint) from error


def show(path: Path) -> None:
    """Open the file in the user's browser; without a browser print the address."""
    import webbrowser

    address = path.absolute().as_uri()
    has_screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.environ.get("BROWSER")
    if (os.uname().sysname == "Linux" and not has_screen) or not webbrowser.open(address):
        say(f"there is no browser to open here: {address}")


def tests_section(tests: Sequence[Tested]) -> list[dict[str, Any]]:
    """Return the newest test of each split; an odd value of a job's event is left out."""
    newest = {str(each.figures.get("split")): each for each in tests}
    words = dict(zip(newest, headline(tests), strict=True))
    return [_picture(each.figures, words[split]) for split, each in newest.items()]


def _picture(figures: Mapping[str, Any], words: str) -> dict[str, Any]:
    """Return a test for the template.

    `cells`: x, y, opacity, count, whether the text is light, and the title. `bars`: x, y, height and title of the
    calibration's bins, whose width is a tenth of SIDE; `dots`: x and y.
    """
    compared = [each for each in figures.get("compared") or () if isinstance(each, dict)]
    names = [name for name in _COMPARED if any(name in each for each in compared)]
    which = [[str(each.get(key) or "-") for key in _WHICH] for each in compared]
    rows = [(*row, *(_cell_text(each.get(name)) for name in names)) for row, each in zip(which, compared, strict=True)]
    table = _rows(figures.get("confusion"))
    is_shown = 0 < len(table) <= _MOST_CLASSES and all(len(row) == len(table) for row in table)
    worst = [each for each in figures.get("worst") or () if isinstance(each, dict)]
    keys = tuple(worst[0]) if worst else ()
    bins = _rows(figures.get("calibration"), 3)
    same = "This split is the eval split, which chose the best checkpoint: the figures are too good."
    return {
        "words": words,
        "warning": same if figures.get("same_as_eval") is True else "",
        "compared": tuple(rows) if len(rows) > 1 else (),
        "head": tuple(name.replace("_f1", " F1").capitalize().replace("f1", "F1") for name in (*_WHICH, *names)),
        "classes": tuple((str(n), *map(_cell_text, row)) for n, row in enumerate(_rows(figures.get("classes")))),
        "count": len(table) if is_shown else 0,
        "cells": tuple(_cells(table)) if is_shown else (),
        "bars": tuple(_bar(place, *row) for place, row in enumerate(bins) if row[0]),
        "dots": tuple((round(EDGE + SIDE * min(1.0, max(0.0, sure)), 1), _y(right)) for n, right, sure in bins if n),
        "pairs": tuple(f"{a:.0f} as {b:.0f}: {n:.0f}" for n, a, b in _rows(figures.get("pairs"), 3)),
        "residuals": quantiles(figures),
        "worst": tuple(tuple(_cell_text(each.get(key)) for key in keys) for each in worst),
        "worst_head": tuple(key.capitalize() for key in keys),
    }


def _cells(table: Sequence[Sequence[float]]) -> Iterator[tuple[float, float, float, str, bool, str]]:
    """Yield the matrix's cells; the opacity is the share of the target's samples."""
    for target, row in enumerate(table):
        whole = sum(row)
        for chosen, count in enumerate(row):
            share = count / whole if whole else 0.0
            opacity = round(_FAINTEST + (1 - _FAINTEST) * share, 3) if count else 0.0
            title = f"target {target}, predicted {chosen}: {count:.0f} of {whole:.0f}"
            text = f"{count:.0f}" if count else ""
            yield EDGE + CELL * chosen, EDGE + CELL * target, opacity, text, opacity > 0.55, title


def _bar(place: int, count: float, right: float, sure: float) -> tuple[float, float, float, str]:
    title = f"{count:.0f} samples, {100 * right:.1f} % right, at a probability of {100 * sure:.1f} % on average"
    return EDGE + place * SIDE / 10, _y(right), round(SIDE * right, 1), title


def _y(share: float) -> float:
    return round(10 + SIDE * (1 - min(1.0, max(0.0, share))), 1)


def _rows(value: Any, length: int | None = None) -> list[list[float]]:
    """Return the rows of numbers in the value; other rows, from a job's own event, are left out."""
    rows = [row for row in value if isinstance(row, list)] if isinstance(value, list) else []
    rows = [row for row in rows if all(type(each) in (int, float) for each in row)]
    return [row for row in rows if length is None or len(row) == length]


def _cell_text(value: Any) -> str:
    return "-" if value is None else facts.figure(value)
