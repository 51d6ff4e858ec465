"""The progress of a job, folded from the event lines of any backend's log; scripts may print event lines, too."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.format import address

from ..text import sanitize
from . import exchange_figures, gpu_figures, loss_bins

_COUNTS = ("step", "max_steps", "samples", "tokens")
_FIGURES = (
    *("loss", "lr", "samples_per_s", "tokens_per_s", "epoch", "mfu", "bubble", "step_s", "data_s", "memory_bytes"),
    *exchange_figures.NAMES,
)
# The keys that each line replaces, none of which adds up over lines: a line folded twice changes nothing.
_NEWEST = (
    *(*_COUNTS, *_FIGURES, "eta_s", "stepped_s", "metrics"),
    *("checkpoint", "checkpoint_step", "saved_s", "saved_after"),
)
_STEPS = (*_COUNTS, "checkpoint_step", "saved_after", "resumed_step")
_CHECKS: dict[str, Callable[[Any], Any]] = {**dict.fromkeys(_STEPS, sanitize.count), "eta_s": sanitize.seconds}
_CHECKS |= dict.fromkeys(("stepped_s", "saved_s"), lambda data: sanitize.within(data, sanitize.LATEST_S))
_CHECKS["run_url"] = address
# Hugging Face's folders, and names with the word: `step_50`, `global_step250`, `epoch=3-step=500.ckpt`.
_STEP = re.compile(r"(?:^checkpoint-|(?:^|[-_])(?:global_?)?step[-_=]?)(\d{1,18})(?:\.[a-z]+)?$", re.IGNORECASE)
_BEHIND_S = 10.0  # a reader's lines may wait so long for earlier lines of other nodes
_MOST_UNKEPT = 6  # names of files that are not kept
_MOST_TOLD = 1000  # notifications by the job itself that are remembered


def fold(progress: dict[str, Any], lines: Iterable[str | tuple[str, float]]) -> dict[str, Any]:
    """Return the progress after further lines of rank 0, each with its write time if known.

    The result is JSON with valid values (`sanitize`), for any input: an infinite loss becomes text. `stepped_s` is the
    time of the last step, `saved_s` of the last save, `saved_after` the last step reported before a save without a
    step, `resumed_step` the step from which the attempt resumed, `parent` the origin of the first step's weights,
    `forecast` the step and the end in the first forecast, `curve` the loss over time (`store.loss_bins`), `gpus` the
    GPUs' figures by rank (`gpu_figures`), `staleness` the updates by staleness (`exchange_figures`), `unkept` the files
    of a script that nothing keeps, `test` the figures of the last test, `tests` the number of tests, and `run_url` the
    link of the run at a tracker. Of a sweep, `sweep` has the trials with a result and the best, and `not_begun` says
    which trial the rest of the time excludes.
    """
    now = dict(progress)
    points: list[tuple[float, int, float]] = []
    for entry in lines:
        line, time_s = (entry, None) if isinstance(entry, str) else entry
        if events.MARK not in line:
            continue
        _, event = events.parse(line)
        if event is None or _fold_sweep(now, event):
            continue
        kind, step = event["e"], sanitize.count(event.get("step"))
        if kind in ("start", "step", "done", "paused"):
            fields = _figures(event)
            known = {key: value for key, value in fields.items() if value is not None}
            now = {key: value for key, value in now.items() if key not in fields} | known
            if now.get("step", 0) > now.get("max_steps", math.inf):
                del now["max_steps"]  # of the first epoch only, as a bar shows it
            if isinstance(event.get("parent"), dict):
                now["parent"] = sanitize.tree(event["parent"])
            if (staleness := exchange_figures.fold(now.get("staleness"), event)) is not None:
                now["staleness"] = staleness
            if kind == "step" and time_s is not None:
                now["stepped_s"] = time_s
                if fields.get("eta_s") is not None:  # keep the first forecast, to compare with the result
                    now.setdefault("forecast", [step, time_s + fields["eta_s"]])
                if step is not None and isinstance(fields.get("loss"), float | int):
                    points.append((time_s, step, float(fields["loss"])))
        elif kind in ("checkpoint", "restart") and event.get("path"):  # saved, or resumed
            _fold_checkpoint(now, event, step, time_s)
        elif kind == "unkept" and isinstance(event.get("names"), list):
            now["unkept"] = [found for each in event["names"][:_MOST_UNKEPT] if (found := sanitize.text(each))]
        elif kind == "gpu" and time_s is not None:
            now["gpus"] = gpu_figures.fold(now.get("gpus") or {}, event.get("gpus"), time_s)
        elif kind == "test" and isinstance(event.get("test"), dict):
            now |= {"test": sanitize.tree(event["test"]), "tests": now.get("tests", 0) + 1}
            now.pop("test_error", None)
        elif kind == "test" and event.get("failed"):
            now["test_error"] = sanitize.text(event["failed"])
        elif kind == "tracker" and (url := address(event.get("url"))):
            now["run_url"] = url
        if kind in ("eval", "done") and isinstance(event.get("metrics"), dict):
            now["metrics"] = sanitize.numbers(event["metrics"])
        elif kind == "notice" and (key := sanitize.text(event.get("key"))):  # sent by the job itself
            now["told"] = [*now.get("told", ()), [sanitize.text(event.get("channel")), key]][-_MOST_TOLD:]
        if isinstance(event.get("diagnosis"), dict):
            now["diagnosis"] = sanitize.tree(event["diagnosis"])
    if points:
        now["curve"] = loss_bins.dump(loss_bins.added(loss_bins.load(now.get("curve")), points))
    return now


def fold_newest(progress: dict[str, Any], lines: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """Return the newest step and save of the progress and of lines of rank 0, some of which it may have already."""
    now = fold({key: progress[key] for key in _NEWEST if key in progress}, lines)
    return {key: now[key] for key in _NEWEST if key in now}


def as_read(progress: dict[str, Any], newest: dict[str, Any]) -> dict[str, Any]:
    """Return the progress with the step and save of a reader of the log (`fold_newest`), unless the reader is stuck."""
    last_s, read_s = (max(each.get("stepped_s") or 0.0, each.get("saved_s") or 0.0) for each in (progress, newest))
    if read_s < last_s - _BEHIND_S:
        return progress
    return {key: value for key, value in progress.items() if key not in _NEWEST} | newest


def sound(progress: dict[str, Any]) -> dict[str, Any]:
    """Return a stored progress with None for each count and time that no job reports: only a damaged row has them."""
    return {key: _CHECKS[key](value) if key in _CHECKS else value for key, value in progress.items()}


def _fold_sweep(now: dict[str, Any], event: dict[str, Any]) -> bool:
    """Enter the figures of a sweep; return whether the event is a trial's, whose steps are no steps of its sweep."""
    if event["e"] == "trial" and isinstance(event.get("sweep"), dict):
        now["sweep"] = sanitize.tree(event["sweep"])
        now.pop("not_begun", None)
    if event["e"] == "preempt" and event.get("not_begun"):
        now["not_begun"] = sanitize.text(event["not_begun"])
    return "trial" in event


def _fold_checkpoint(now: dict[str, Any], event: dict[str, Any], step: int | None, time_s: float | None) -> None:
    """Enter a save or a resume in the progress `now`."""
    kind = event["e"]
    name = (sanitize.text(event["path"]) or "").rpartition("/")[2]
    if step is None and (named := _STEP.search(name)) and not _is_epoch(now, int(named[1])):
        step = int(named[1])
    if kind == "restart" and step != now.get("checkpoint_step"):
        now.pop("saved_s", None)  # an older checkpoint of unknown age
    if kind == "restart":
        now.setdefault("resumed_step", step)
    # The agent reports a save whose step the job has reported, or a file that a script overwrites at each save.
    is_overwritten = kind == "checkpoint" and now.get("checkpoint_step") is None
    if step is not None or name != now.get("checkpoint") or is_overwritten:
        now["checkpoint_step"] = step
        now |= {"saved_after": now.get("step")} if step is None else {}
    now["checkpoint"] = name
    if kind == "checkpoint" and time_s is not None:
        changed_s = sanitize.value(event.get("changed_s"))  # of a kept file, which the agent found later
        now["saved_s"] = min(time_s, changed_s) if isinstance(changed_s, float | int) else time_s


def _is_epoch(now: dict[str, Any], number: int) -> bool:
    """Return whether a checkpoint's number counts epochs: the job is in that epoch, and far beyond that step."""
    epoch = now.get("epoch")
    return isinstance(epoch, int | float) and abs(number - epoch) <= 1 and now.get("step", 0) > 4 * number


def _figures(event: dict[str, Any]) -> dict[str, Any]:
    """Return the step's figures in the event; None for an invalid value."""
    found: dict[str, Any] = {key: sanitize.count(event[key]) for key in _COUNTS if key in event}
    found |= {key: sanitize.value(event[key]) for key in _FIGURES if key in event}
    return found | ({"eta_s": sanitize.seconds(event["eta_s"])} if "eta_s" in event else {})


def shown(progress: dict[str, Any]) -> str:
    """Return the progress in a few words: `step 120/2000 loss 1.234`."""
    if isinstance(test := progress.get("test"), dict) and not progress.get("step"):  # a job that only tests
        names = [name for name in ("accuracy", "mae", "loss") if isinstance(test.get(name), float)]
        return " ".join([str(test.get("split")), *(f"{name} {test[name]:.4g}" for name in names)])
    if isinstance(sweep := progress.get("sweep"), dict):
        best = sweep.get("best")
        value = f", {sweep.get('metric')} {best:.4g}" if isinstance(best, float | int) else ""
        return f"{sweep.get('done')}/{sweep.get('trials')} trials{value}"
    if "step" not in progress:
        return ""
    of = f"/{progress['max_steps']}" if progress.get("max_steps") else ""
    loss = progress.get("loss")
    text = f"step {progress['step']}{of}"
    if loss is None:
        return text
    return f"{text} loss {loss:.4g}" if isinstance(loss, float | int) else f"{text} loss {loss}"


def trial_counts(progress: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a sweep's trials with a result, the planned trials and the best value; None for any other job."""
    sweep = progress.get("sweep")
    return sweep and {{"trials": "planned"}.get(name, name): value for name, value in sweep.items()}


def lineage(config: Mapping[str, Any], progress: Mapping[str, Any]) -> str:
    """Return the parent in words: as the job has reported it, else as its config names it; empty without a parent."""
    found, asked = progress.get("parent"), config.get("init_from")
    if isinstance(found, dict):
        of = str(found.get("job") or found.get("path"))
        step = "" if found.get("step") is None else f" step {found['step']}"
        return f"{of}{step}, sha256 {str(found.get('sha256'))[:12]}"
    if not isinstance(asked, dict):
        return ""
    return f"{asked.get('job') or asked.get('path')} {asked.get('checkpoint') or ''}".rstrip().replace("step-", "step ")


def unkept(progress: dict[str, Any]) -> str:
    """Return which files of a script are lost with the nodes, and the key that keeps the files; empty if none."""
    names = ", ".join(str(name) for name in progress.get("unkept") or ())
    return f"not kept: {names}; to keep: `keep: [{names}]` in the config" if names else ""


def data_share(progress: dict[str, Any]) -> float | None:
    """Return the share of a step, 0 to 1, that was spent waiting for data, at the last reported step."""
    step_s, data_s = progress.get("step_s"), progress.get("data_s")
    if not isinstance(step_s, float | int) or not isinstance(data_s, float | int) or step_s <= 0:
        return None
    return min(1.0, max(0.0, data_s / step_s))


def finite(value: Any, depth: int = 20) -> Any:
    """Return the value with numbers that JSON cannot hold as text (`nan`, `inf`); None below `depth` levels."""
    if isinstance(value, dict | list) and depth == 0:
        return None
    if isinstance(value, dict):
        return {key: finite(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item, depth - 1) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
