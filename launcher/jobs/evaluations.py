"""The tests of a job, after the last step and by later jobs of `cloudtrain evaluate`: config, count and text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.entrypoints.format import counted
from cloudtrain.entrypoints.trainer.strategies.facts import FACTS

from ..errors import UsageError
from ..text.tables import table

if TYPE_CHECKING:
    from ..config.schema import JobConfig
    from ..job import Attempt, Job
    from ..store.registry import Registry

LONGEST_S = 3600  # of an evaluation, unless the parent's limit is shorter
_LONGEST_NAME = 31  # of a job's own name in the name of its evaluation
_NONE = ("training.pause_at", "training.diagnose_steps", "checkpoint.uri", "checkpoint.mirror")


@dataclass(frozen=True)
class Tested:
    """A test: the testing job, and the figures of the event. `count`: the number of the job's tests."""

    job_id: str
    figures: Mapping[str, Any]
    count: int


def config_of(parent: Job, split: str, checkpoint: str | None, settings: Sequence[str]) -> JobConfig:
    """Return the config of a job that tests the parent's weights, with `settings`. Raises UsageError, ConfigError."""
    from .. import config as configs

    if not parent.asked.task:
        raise UsageError(f"{parent.id} runs a script", hint="only a `task` has a dataset by split")
    if parent.config.get("sweep"):
        raise UsageError(f"{parent.id} is a sweep", hint=f"cloudtrain best {parent.id} -o best.yaml; then submit that")
    if tested := _parent(parent):
        raise UsageError(f"{parent.id} is a test of {tested}", hint=f"cloudtrain evaluate {tested}")
    before = configs.stored(parent.config)
    training, earlier = before.training, before.evaluate
    initial = {"job": parent.id, **({"checkpoint": checkpoint} if checkpoint else {})}
    wanted = {"split": split, "only": True, "batch_size": earlier.batch_size if earlier else None}
    inputs = {name: uri for name, uri in before.inputs.items() if name != "init_from"}
    is_shared = not FACTS[training.strategy].is_whole or training.parallel.tensor * training.parallel.pipeline > 1
    own = [
        f"name={_name_of(parent)}",
        f"init_from={json.dumps(initial)}",
        f"evaluate={json.dumps({key: value for key, value in wanted.items() if value is not None})}",
        "inputs=" + json.dumps(inputs).replace("${", "$${"),  # filled in at the parent's submit
        "outputs={}",
        "resources.spot=false",
        f"limits.max_duration={min(LONGEST_S, before.limits.max_duration)}s",
        *([] if is_shared else ["resources.instances=1"]),
        "resources.min_instances=null",
        "checkpoint.resume=auto",  # a path there excludes `init_from`
        *(f"{key}=null" for key in _NONE),
    ]
    found = configs.stored(parent.config, overrides=[*own, *settings])
    tests, of = found.evaluate is not None and found.evaluate.only, found.init_from
    if found.name != _name_of(parent) or not tests or of is None or of.job != parent.id:
        message = "`name`, `init_from.job` and `evaluate.only` of a test are fixed: by these the test is counted"
        raise UsageError(message, hint="leave them out of --set")
    return found


def _name_of(parent: Job) -> str:
    return f"{parent.name[:_LONGEST_NAME].rstrip('-')}-evaluate"


def tests_of(registry: Registry, job: Job) -> list[Tested]:
    """Return the tests of the job's weights: the job's own first, then later jobs by the time of the submit."""
    runs = [(job.id, attempt.progress) for attempt in registry.attempts(job)]
    children = [child for child in registry.named(_name_of(job)) if _parent(child) == job.id]
    runs += [(child.id, child.attempt.progress) for child in children]
    tested = ((name, each) for name, each in runs if isinstance(each.get("test"), dict))
    return [Tested(name, each["test"], each.get("tests", 1)) for name, each in tested]


def parents(jobs: Sequence[Job]) -> dict[str, str]:
    """Return the parent's id for each job that is an evaluation."""
    return {job.id: parent for job in jobs if (parent := _parent(job)) is not None}


def _parent(job: Job) -> str | None:
    asked, test = job.config.get("init_from"), job.config.get("evaluate")
    is_evaluation = isinstance(test, dict) and test.get("only") is True and isinstance(asked, dict)
    return asked.get("job") if is_evaluation and isinstance(asked, dict) else None


def looks(tests: Sequence[Tested], split: str) -> int:
    """Return the number of looks at the split."""
    return sum(each.count for each in tests if each.figures.get("split") == split)


def failure(attempt: Attempt) -> list[str]:
    """Return a line about a test that failed after the last step; empty if the newest test has figures."""
    fault = attempt.progress.get("test_error")
    return [f"failed: {fault}"] if fault else []


def headline(tests: Sequence[Tested]) -> Iterator[str]:
    """Yield a line for the newest test of each split, with the number of looks."""
    for split in dict.fromkeys(str(each.figures.get("split")) for each in tests):
        last = [each for each in tests if each.figures.get("split") == split][-1]
        step = "" if last.figures.get("step") is None else f", step {last.figures['step']}"
        seen = looks(tests, split)
        again = f"; evaluated on {split} {counted(seen, 'time')}" if seen > 1 else ""
        yield f"{split}: {_words(last.figures)}{step} ({last.job_id}){again}"


def _words(figures: Mapping[str, Any]) -> str:
    number = f"{figures.get('n')} samples"
    if figures.get("kind") == "classification":
        low, high = _figure(figures.get("accuracy_low")), _figure(figures.get("accuracy_high"))
        return f"accuracy {_figure(figures.get('accuracy'))} ({low} to {high}, 95 %), {number}"
    names = ("mae", "rmse", "r2") if figures.get("kind") == "regression" else tuple(figures)
    known = [f"{name} {_figure(figures[name])}" for name in names if isinstance(figures.get(name), float)]
    return ", ".join([*known, number])


def lines(tested: Tested) -> list[str]:
    """Return the figures of a test as text: the headline, compared weights, classes, pairs, calibration, samples."""
    figures = tested.figures
    found = [_words(figures)]
    if figures.get("same_as_eval"):
        found.append("warning: this split is the eval split, which chose the best checkpoint: the figures are too good")
    compared = [each for each in figures.get("compared") or () if isinstance(each, dict)]
    names = [name for name in ("accuracy", "loss", "macro_f1", "mae", "rmse") if any(name in each for each in compared)]
    if len(compared) > 1:
        rows = [[str(each.get(k) or "-") for k in ("checkpoint", "step", "weights")] for each in compared]
        rows = [[*row, *(_figure(each.get(n)) for n in names)] for row, each in zip(rows, compared, strict=True)]
        found += ["", *table(["CHECKPOINT", "STEP", "WEIGHTS", *(n.upper() for n in names)], rows)]
    if classes := figures.get("classes"):
        rows = [[str(place), *map(_figure, row)] for place, row in enumerate(classes)]
        found += ["", *table(["CLASS", "PRECISION", "RECALL", "F1", "SAMPLES"], rows)]
    if pairs := figures.get("pairs"):
        found += ["", "most confused: " + ", ".join(f"{a} as {b} {n} x" for n, a, b in pairs[:5])]
    if residuals := quantiles(figures):
        found += ["", f"residuals: {residuals}"]
    if worst := figures.get("worst"):
        found += ["worst samples, by index: " + ", ".join(str(each.get("index")) for each in worst)]
    return found


def quantiles(figures: Mapping[str, Any]) -> str:
    """Return the residuals' quantiles in words; empty for a classification."""
    rows = [each for each in figures.get("quantiles") or () if isinstance(each, dict)]
    pairs = [(each.get("share"), each.get("residual")) for each in rows]
    return ", ".join(f"{100 * share:.0f} % {_figure(value)}" for share, value in pairs if isinstance(share, float))


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
