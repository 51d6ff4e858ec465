"""The forms of a printed step: from a line of text to its figures. Pure.

docs/steps.md lists the forms. `LineFigures.weight` is the precision of a step: if a script prints several forms, the
heaviest form counts (steps.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MOST = 4096  # characters: longer lines are not read
# Weights: an epoch alone, a bar without a name, an epoch with figures, a bar of an epoch or with a loss, a step.
EPOCH, BAR, EPOCH_FIGURES, NAMED_BAR, FINE = 1, 2, 3, 4, 5
FREE = 0  # figures without a step: another line, or the library, has the step

NUMBER = r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?|nan|inf(?:inity)?)"
_COUNT = r"(\d+)(?:\s*(?:/|of)\s*(\d+))?(?!\.?\d)"
_EPOCH = re.compile(rf"(?<![a-z_])epoch\b['\"]?\W{{0,3}}?{_COUNT}", re.IGNORECASE)
_STEP = re.compile(
    rf"(?<!per )\b(?:global[_ ]?step|step|iter|iteration|batch|update)\b['\"]?\W{{0,8}}?{_COUNT}", re.IGNORECASE
)
_BRACKET = re.compile(r"\[\s*(\d+)\s*/\s*(\d+)(?:\s*\(\s*\d+%\s*\))?\s*\]")
_PAIR = re.compile(r"\[(\d+),\s*(\d+)\]\s")  # [epoch, batch]
_LOSS = re.compile(
    r"(?<![a-z])((?:(?:train(?:ing)?|val(?:id(?:ation)?)?|eval(?:uation)?|test|avg|average|mean|batch|running|total)"
    rf"[\s_/.-]*)*)loss\b['\"]?[\s:=(\[]{{0,4}}(?:tensor\()?({NUMBER})(?![\w.])",
    re.IGNORECASE,
)
_RATE = re.compile(rf"\b(?:lr|learning[_ ]rate)\b['\"]?[\s:=]{{0,3}}({NUMBER})(?![\w.])", re.IGNORECASE)
_ITEM = re.compile(
    rf"['\"]([\w/@.-]+)['\"]\s*:\s*(?:np\.float\d+\()?['\"]?({NUMBER})\)?['\"]?\s*(?=[,}}])", re.IGNORECASE
)
_EVAL = re.compile(r"val|eval|test", re.IGNORECASE)
_EVAL_LINE = re.compile(r"\W*(?:\[[^\]]*\]\s*)?(?:val|valid|validation|eval|evaluation|test|testing)\b", re.IGNORECASE)
_EPOCH_LINE = re.compile(rf"\W*(?:\[[^\]]*\]\s*)?epoch\W{{0,3}}?{_COUNT}\W*?[|:,-]", re.IGNORECASE)
_BAR = re.compile(r"(.*?)(?::\s*)?\d+%\|[^|]*\|\s*(\d+)/(\d+)\s*\[(.*)", re.DOTALL)
_BAR_OF_STEPS = re.compile(r"\W*(?:epochs?|ep|train|training|steps?|iter|iters|iterations?)\b", re.IGNORECASE)
_BAR_OF_ELSE = re.compile(r"val|eval|test|predict|sanity|token|load|generat|split|dataset", re.IGNORECASE)
_SHORT = {"learning_rate": "lr", "max_steps": "total", "total_steps": "total", "global_step": "step"}


@dataclass(frozen=True)
class LineFigures:
    """The figures of a line."""

    weight: int
    step: int | None = None
    total: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    name: str | None = None  # of a bar
    fields: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)  # of an evaluation; a line with scores alone has no step


def may_have_step(line: str) -> bool:
    """Return whether the line may have a step: a cheap test, made for each of 100,000 plain lines a second."""
    low = line.lower()
    return "step" in low or "loss" in low or "epoch" in low or "iter" in low or "%|" in low or "::ct" in low


def read(line: str) -> LineFigures | None:
    """Return the figures of a line in a known form, else None."""
    if "%|" in line:
        return _bar(line)
    if "{" in line and (items := {name: float(value) for name, value in _ITEM.findall(line)}):
        return _items(line, items)
    return _text(line)


def _bar(line: str) -> LineFigures | None:
    """Read the newest state of a tqdm bar, if the bar may be training's."""
    match = _BAR.match(line)
    if match is None:
        return None
    name, step, total, rest = match[1].strip(), int(match[2]), int(match[3]), match[4]
    losses = [(who, value) for who, value in _LOSS.findall(rest) if not _EVAL.search(who)]
    is_named = bool(_BAR_OF_STEPS.match(name))
    if _BAR_OF_ELSE.search(name) or not (losses or is_named or not name):
        return None
    fields = {"loss": float(losses[0][1])} if losses else {}
    if (rate := _RATE.search(rest)) is not None:
        fields["lr"] = float(rate[1])
    if re.fullmatch(r"epochs?\W*", name, re.IGNORECASE):  # the bar of all epochs
        return LineFigures(EPOCH_FIGURES if losses else EPOCH, epoch=step, epochs=total, fields=fields)
    weight = NAMED_BAR if losses or is_named else BAR
    epoch, epochs = _counts(_EPOCH.search(name))
    return LineFigures(weight, step, total, epoch, epochs, re.sub(r"\d+", "#", name), fields)


def _items(line: str, items: dict[str, float]) -> LineFigures | None:
    """Read a printed dict or a line of JSON."""
    items = {_SHORT.get(name, name): value for name, value in items.items()}
    if "train_runtime" in items:  # the summary at the end of Hugging Face's Trainer
        return None
    step, total, epoch = (_whole(items.get(name)) for name in ("step", "total", "epoch"))
    if "loss" not in items and "train_loss" in items:
        items["loss"] = items["train_loss"]
    figures = {name: value for name, value in items.items() if name not in ("step", "total", "epoch")}
    if figures and all(_EVAL.match(name) for name in figures):
        speed = ("_runtime", "_per_second")
        scores = {name: value for name, value in figures.items() if not name.endswith(speed)}
        return LineFigures(FREE, step, scores=scores)
    if step is not None:
        return LineFigures(FINE, step, total, fields=figures)
    if (match := _EPOCH.match(line)) is not None:
        epoch, epochs = _counts(match)
        return LineFigures(EPOCH_FIGURES, epoch=epoch, epochs=epochs, fields=figures)
    if "loss" not in figures or epoch is None:
        return None
    # Hugging Face's Trainer: the fraction of an epoch, and no step.
    return LineFigures(FREE, epoch=epoch, fields=figures | {"epoch": items["epoch"]})


def _text(line: str) -> LineFigures | None:
    fields: dict[str, float] = {}
    scores: dict[str, float] = {}
    low = line.lower()
    for who, value in _LOSS.findall(line) if "loss" in low else ():
        name = "_".join(re.findall(r"[a-z]+", f"{who} loss".lower()))
        (scores if _EVAL.search(who) else fields).setdefault(name, float(value))
    epoch, epochs = _counts(_EPOCH.search(line) if "epoch" in low else None)
    step, total = _counts(_STEP.search(line))
    if step is None and (bracket := _BRACKET.search(line)) is not None:
        step, total = int(bracket[1]), int(bracket[2])
    elif step is None and (pair := _PAIR.match(line)) is not None:
        epoch, step = int(pair[1]), int(pair[2])
    if _EVAL_LINE.match(line):
        return LineFigures(FREE, scores=scores | fields) if (scores or fields) and step is None else None
    if scores and step is not None and (not fields or epoch is None):  # a validation, or nanoGPT's pair of estimates
        return LineFigures(FREE, step if epoch is None else None, scores=scores | fields)
    if fields and "loss" not in fields:
        fields = {"loss": next(iter(fields.values())), **fields}
    has_figures = bool(fields or scores)  # a learning rate alone is none
    if (rate := _RATE.search(line)) is not None:
        fields["lr"] = float(rate[1])
    if step is not None and (fields or total is not None):
        weight = FINE if fields else BAR  # `Step 1/3: loading data` may belong to the set-up
        return LineFigures(weight, step, total, epoch, epochs, fields=fields | scores)
    if epoch is not None and step is None and (has_figures or _EPOCH_LINE.match(line)):
        weight = EPOCH_FIGURES if has_figures else EPOCH
        return LineFigures(weight, epoch=epoch, epochs=epochs, fields=fields, scores=scores)
    return None


def _counts(match: re.Match[str] | None) -> tuple[int | None, int | None]:
    """Return the count and the whole of `3/10`."""
    return (None, None) if match is None else (int(match[1]), int(match[2]) if match[2] else None)


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and value == value and abs(value) < 2**53 else None
