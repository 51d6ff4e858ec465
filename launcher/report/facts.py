"""The text and tables of a job's report; unknown facts are left out, never guessed."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from shlex import join
from typing import Any, TypeGuard

from cloudtrain.entrypoints.format import dollars, failure, most, span

from ..job import Job
from ..jobs.view import JobView
from ..metering import meter
from ..store import exchange_figures, gpu_figures
from ..store.progress import lineage
from ..store.series import Series
from ..text.units import moment

Row = tuple[str, str]
_FALLS = re.compile(r"loss|perplexity|error|bits_per|mae|mse", re.IGNORECASE)
_RISES = re.compile(r"acc|f1|auc|precision|recall|bleu|score", re.IGNORECASE)
_LAST_CHECKPOINTS = 12


def figure(value: Any) -> str:
    """Return a number with four digits, a large number without decimals, or any value except a number as text."""
    if isinstance(value, bool) or not isinstance(value, float | int):
        return str(value)
    return f"{value:,.0f}" if isinstance(value, int) or 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def results(view: JobView, series: Series) -> dict[str, Any]:
    """Return the known results of the job, under the names that `compare` shows too."""
    losses, spent = _losses(series), view.money.spent_micro
    known: dict[str, Any] = {
        "steps": view.progress.get("step"),
        "loss": losses[-1][0] if losses else view.progress.get("loss"),
        "lowest_loss": min(losses, key=lambda each: each[0])[0] if losses else None,
        "samples_per_s": _median(series, "samples_per_s"),
        "bytes_sent": _median(series, "bytes_sent"),
        "running_s": _ran_s(view),
        "spend_usd": spent / 1e6 if spent else None,  # a machine without a price does not necessarily cost zero
    }
    for name, value in (view.progress.get("metrics") or {}).items():
        known[f"metrics.{name}"] = value
        if best := _best(name, view.job, series):
            known[f"best.{name}"] = best[0]
    return {name: value for name, value in known.items() if value is not None}


def headline(view: JobView, series: Series) -> Iterator[tuple[str, str, str]]:
    """Yield the cards at the top: name, figure, and a line below."""
    job, progress, state = view.job, view.progress, view.state
    if _is_number(step := progress.get("step")):
        last = progress.get("max_steps")
        done = f"of {last:,}, {int(100 * step // last)} %" if isinstance(last, int) and last > 0 else ""
        yield "Steps", f"{step:,}", done
    if losses := _losses(series):
        least, at = min(losses, key=lambda each: each[0])
        yield "Loss", figure(losses[-1][0]), f"lowest {figure(least)}{_at(at)}"
    elif progress.get("loss") is not None:
        yield "Loss", figure(progress["loss"]), ""
    for name, value in list((progress.get("metrics") or {}).items())[:3]:
        best = _best(name, job, series)
        title = "Loss, evaluated" if name == "loss" else name[:1].upper() + name[1:].replace("_", " ")
        yield title, figure(value), f"best {figure(best[0])}{_at(best[1])}" if best else ""
    if (rate := _median(series, "samples_per_s")) is not None:
        yield "Throughput", figure(float(f"{rate:.4g}")), "samples/s, median"
    if (sent := exchange_figures.words(progress)) and any(name in progress for name in exchange_figures.NAMES[1:]):
        yield "Exchange", sent.partition(", ")[0], exchange_figures.histogram(progress) or sent.partition(", ")[2]
    if (busy := gpu_figures.mean(progress)) is not None:
        yield "GPUs", f"{busy:.0f} %", f"busy, mean; at the end {gpu_figures.words(progress)}"
    whole_s = (view.now_s if job.active else state.ended_s or view.now_s) - job.created_s
    if ran_s := _ran_s(view):
        until = "since its submit" if job.active else "from submit to end"
        yield "Time", span(ran_s), f"running; {span(whole_s)} {until}"
    money = view.money
    if money.spent_micro is None:
        yield "Cost", "unknown", "no price is known for its machines"
    elif money.spent_micro or money.limit_micro:
        share = "" if money.percent is None else f"{money.percent} % of {dollars(money.limit_micro)}"
        yield "Cost", most(money.spent_micro), share


def environment(job: Job, series: Series) -> Iterator[Row]:
    """Yield the environment of the job, from its newest start event and its plan."""
    plan, starts = job.attempt.plan, [point for point in series.marks if point.kind == "start"]
    fields = starts[-1].fields if starts else {}
    block = job.config.get(job.backend) or {}
    yield "backend", job.backend
    yield from [(key, str(block[key])) for key in ("region", "location", "workspace", "project") if block.get(key)]
    yield "machines", f"{plan.instances} x {plan.machine or 'a machine'}"
    for key, name in _RESOURCES:
        if value := (job.asked.resources or {}).get(key):
            yield name, "yes" if value is True else str(value)
    yield "ranks", f"{plan.instances} x {plan.nproc_per_node} = {plan.ranks}"
    if url := job.attempt.progress.get("run_url"):
        yield "run at the tracker", str(url)
    if job.asked.image:
        yield "image", str(job.asked.image)
    if fields.get("gpu"):
        memory = fields.get("memory_total_bytes")
        yield "GPU", f"{fields['gpu']}, {memory / 2**30:.0f} GiB" if _is_number(memory) else str(fields["gpu"])
    elif fields.get("device"):
        yield "device", str(fields["device"])
    yield from [(name, str(fields[key])) for key, name in _START_FIELDS if fields.get(key) is not None]
    if _is_number(fields.get("global_batch_size")) and _is_number(fields.get("micro_batch_size")):
        ranks = f"{fields.get('ranks')} ranks"
        for key, words in (("tensor", "that share each layer"), ("pipeline", "stages")):
            ranks += f" / {fields[key]} {words}" if fields.get(key, 1) != 1 else ""
        split = f"{fields['micro_batch_size']} x {ranks} x {fields.get('accumulation')} accumulated"
        yield "batch", f"{fields['global_batch_size']} samples a step = {split}"
    if _is_number(fields.get("parameters")):
        yield "parameters", f"{fields['parameters']:,}"
    if _is_number(fields.get("dataset_length")):
        yield "training samples", f"{fields['dataset_length']:,}"


_RESOURCES = (("instance_type", "instance type"), ("accelerators", "accelerators asked for"), ("spot", "spot"))
_START_FIELDS = (
    *(("python", "Python"), ("torch", "torch"), ("cuda", "CUDA"), ("nccl", "NCCL"), ("strategy", "strategy")),
    *(("precision", "precision"), ("optimizer", "optimizer"), ("seed", "seed"), ("reproducible", "reproducible")),
)


def code(job: Job, series: Series) -> Iterator[Row]:
    """Yield the identity of the code: the commit, uncommitted changes, and the hash of the bundle."""
    git = job.bundle.get("git") or {}
    if git.get("commit"):
        state = "with uncommitted changes" if git.get("dirty") else "nothing uncommitted"
        yield "git commit", f"{git['commit']}, {state}"
        if git.get("branch"):
            yield "branch", str(git["branch"])
    else:
        yield "git commit", "none: the folder was in no repository, or git was not there"
    if job.bundle.get("sha256"):
        size = f"{job.bundle['files']} files, {job.bundle['code_bytes'] / 1000:,.1f} kB"
        yield "what was sent", f"{size}, sha256 {job.bundle['sha256']}"
    for point in [point for point in series.marks if point.kind == "start"][-1:]:
        yield from [(name, str(point.fields[key])) for key, name in _HASHES if point.fields.get(key)]
    if parent := lineage(job.config, job.attempt.progress):
        yield "parent", parent
    yield "config file", job.config_file


_HASHES = (("code_sha256", "task file, sha256"), ("dataset_fingerprint", "data, fingerprint"))


def plan_rows(view: JobView) -> Iterator[tuple[str, str, str]]:
    """Yield rows of plan against result: for the newest attempt, and for the job's money."""
    last, plan = view.job.attempt, view.job.attempt.plan
    if view.took_s is not None:
        why = "budget" if plan.cap_reason == "budget" else "time limit"
        yield f"time, attempt {last.number}", f"at most {span(plan.cap_s)} ({why})", span(view.took_s)
    spent = meter.spent_micro(meter.legs_of([last]), view.now_s)
    worst = plan.worst_case_usd
    if worst is not None and spent is not None and (worst or spent):
        yield f"cost, attempt {last.number}", f"at worst {dollars(worst * 1e6)}", most(spent)
    for attempt in view.attempts:
        forecast = attempt.progress.get("forecast")
        if not isinstance(forecast, list) or len(forecast) != 2 or not _is_number(forecast[1]):
            continue
        ended_s = attempt.state.ended_s if attempt is not last or not view.job.active else None
        came = "runs"
        if ended_s is not None:
            late_s = ended_s - forecast[1]
            off = f"{span(abs(late_s))} {'later' if late_s > 0 else 'earlier'}" if abs(late_s) >= 1 else "as reported"
            came = f"{moment(ended_s)} UTC, {off if attempt.state.state == 'succeeded' else 'unfinished'}"
        planned = f"{moment(forecast[1])} UTC, reported at step {forecast[0]}"
        yield f"end, attempt {attempt.number}", planned, came
    if (hourly := last.hourly_usd) is not None:
        source = ", ".join(each for each in (plan.price_source, plan.price_as_of) if each)
        source = f"by {source}" if source else ""
        yield "price", f"{dollars(hourly * 1e6)} an hour, all instances", source


def failures(view: JobView) -> Iterator[dict[str, str]]:
    """Yield the exception of the first failing rank, for each failed attempt."""
    for attempt in view.runs:
        if error := attempt.state.error:
            who = f"rank {error['rank']}" if error.get("rank") is not None else "the job"
            where = f" on node {error['node']}" if error.get("node") is not None else ""
            yield {
                "title": f"Attempt {attempt.number}: {who}{where}",
                "message": failure(None, error.get("type"), error.get("message", "")),
                "traceback": str(error.get("traceback") or ""),
                "lines": "\n".join(map(str, error.get("lines") or ())),
            }


def checkpoints(series: Series) -> tuple[str, list[tuple[str, ...]]]:
    """Return the number of checkpoints as text, and the newest: step, attempt, time, seconds, size, path."""
    rows: list[tuple[str, ...]] = []
    saved = [point for point in series.marks if point.kind == "checkpoint" and point.fields.get("path")]
    for point in saved[-_LAST_CHECKPOINTS:]:
        seconds, size = point.fields.get("seconds"), point.fields.get("bytes")
        step = "-" if point.step is None else f"{point.step:,}"
        took, held = f"{seconds:.2f} s" if _is_number(seconds) else "-", _size(size) if _is_number(size) else "-"
        rows.append((step, str(point.attempt), moment(point.time_s), took, held, str(point.fields["path"])))
    is_thinned = any(point.weight != 1 for point in saved)
    count = "more reported than are kept here" if is_thinned else f"{len(saved)} reported"
    return count + (f"; the newest {len(rows)}" if len(saved) > len(rows) else ""), rows


def commands(view: JobView) -> Iterator[Row]:
    """Yield commands: to continue, to repeat the job, to see more."""
    job = view.job
    yield from [("next", command) for command in view.next_steps if command.startswith("cloudtrain")]
    git = job.bundle.get("git") or {}
    if git.get("commit"):
        yield "the same code", f"git checkout {git['commit']}"
    if git.get("dirty") and job.bundle.get("path"):
        yield "with its changes", f"tar -xzf {job.bundle['path']} code"
    # Options of the command line are stored only in the config, and the file may have changed since.
    file, label, again = Path(job.config_file), "file, without its options", f"-f {job.config_file}"
    if job.attempt.settings and not file.exists():  # of a script without a file
        label, again = f"settings, in {file.parent}", join(f"--set={each}" for each in job.attempt.settings)
    yield f"a new job of its {label}", f"cloudtrain submit {again}"
    yield "its lines", f"cloudtrain logs {job.id}"


def _best(name: str, job: Job, series: Series) -> tuple[Any, int | None] | None:
    """Return the best value of a metric and its step; None if the better direction is unknown."""
    monitor = job.asked.monitor
    mode = monitor.get("mode") if monitor.get("metric") == name else None
    if mode is None and (_FALLS.search(name) or _RISES.search(name)):
        mode = "min" if _FALLS.search(name) else "max"
    evals = [point for point in series.marks if point.kind == "eval"]
    values = [(value, point.step) for point in evals if _is_number(value := point.fields.get("metrics", {}).get(name))]
    if mode is None or not values:
        return None
    return (min if mode == "min" else max)(values, key=lambda each: float(each[0]))


def _median(series: Series, name: str) -> float | None:
    """Return the median of a figure over all steps, each row with its weight; None without values."""
    steps = [point for point in series.steps if point.weight]
    rows = sorted((value, point.weight) for point in steps if _is_number(value := point.fields.get(name)))
    half, places = sum(weight for _, weight in rows) / 2, list(accumulate(weight for _, weight in rows))
    if not rows:
        return None
    low, high = rows[bisect_left(places, half)][0], rows[min(bisect_right(places, half), len(rows) - 1)][0]
    return (low + high) / 2


def _ran_s(view: JobView) -> float:
    return sum(max(0.0, meter.held_s(attempt, view.now_s) or 0.0) for attempt in view.attempts)


def _losses(series: Series) -> list[tuple[float, int | None]]:
    return [(point.fields["loss"], point.step) for point in series.steps if _is_number(point.fields.get("loss"))]


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step:,}"


def _size(count: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, float | int) and not isinstance(value, bool)


def attempt_rows(data: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Return a row of text for each attempt of `chart_data`."""
    for each in data:
        steps = "-" if each["last_step"] is None else f"{each['first_step'] or 0:,} to {each['last_step']:,}"
        reason = f" ({each['reason'].replace('_', ' ')})" if each["reason"] else ""
        spent = dollars(None if each["spent_usd"] is None else each["spent_usd"] * 1e6)
        about = str(each["number"]), f"{each['state']}{reason}", steps, moment(each["began_s"]), each["took"] or "-"
        yield (*about, str(each["restarts"] or "-"), spent, each["detail"] or "")
