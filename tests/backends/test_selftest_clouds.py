"""`cloudtrain selftest` on the clouds' stand-ins: a clean run is ok, and each seeded difference is found and named."""

import gc
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from wholejobs import SETTINGS

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher import cli as command_line
from cloudtrain.launcher.selftest import planned

pytestmark = [pytest.mark.slow, pytest.mark.soak]
FIXTURES = {"sagemaker": "account", "azureml": "azure_account", "vertex": "google_project"}
LIMITS = {"sagemaker": "45s", "azureml": "65s", "vertex": "90s"}
Rows = dict[str, dict[str, Any]]


@pytest.fixture
def selftest(
    request: pytest.FixtureRequest,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[[str], tuple[Rows, str]]:
    """Return a function that runs the selftest of a backend with shorter jobs; it returns the rows and the screen."""

    def run(backend: str, *, is_slow: bool = False) -> tuple[Rows, str]:
        short = tmp_path / "templates"
        short.mkdir()
        for path in planned.TEMPLATES.iterdir():
            text = path.read_text(encoding="utf-8").replace("limit: 12m", f"limit: {LIMITS[backend]}")
            if not is_slow:
                text = text.replace('PACE_S: "0.5"', 'PACE_S: "0.1"').replace("max_steps: 600", "max_steps: 150")
            (short / path.name).write_text(text)
        monkeypatch.setattr(planned, "TEMPLATES", short)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "cloudtrain.yaml").write_text(
            SETTINGS[backend]
            .replace(": {", ": {price_per_hour: 1, ")
            .replace("resources: {price_per_hour: 1, ", "resources: {")
        )
        backends._made.cache_clear()
        gc.disable()  # a registry belongs to its thread: collect no feed's registry during the run
        command_line._run(
            ["selftest", backend, "-y", "--budget", "50USD", "-o", "proof.json"], debug=False, as_json=False
        )
        gc.collect()
        gc.enable()
        told = capsys.readouterr()
        print(told.out, told.err)
        report = json.loads((tmp_path / "proof.json").read_text())
        return {row["step"]: row for row in report["steps"]}, told.out + told.err

    return run


@pytest.mark.parametrize("backend", FIXTURES)
def test_clean_run_is_ok(request: pytest.FixtureRequest, selftest: Any, backend: str) -> None:
    """No step differs, and each step is checked."""
    request.getfixturevalue(FIXTURES[backend])
    rows, screen = selftest(backend)
    print(screen, json.dumps(rows, indent=1))
    assert {row["verdict"] for row in rows.values()} == {"ok"}, screen


class Seed(NamedTuple):
    """A difference: how the stand-in gets it, the step that finds it, and what the screen says below the step."""

    name: str
    act: Callable[[Any], object]
    step: str
    words: str


CREATE, DESCRIBE = "CreateTrainingJob", "DescribeTrainingJob"
LINE = r"selftest\W.*step\W+{}\b"


def _set(**values: Any) -> Callable[[Any], None]:
    return lambda double: double.settings(**values)


def _change(*args: Any, **more: Any) -> Callable[[Any], None]:
    return lambda double: double.change(*args, **more)


def _fault(*args: Any, **more: Any) -> Callable[[Any], None]:
    return lambda double: double.fault(*args, **more)


# Differences that do not hide each other share a run, because a run takes one to two minutes.
RUNS: dict[str, list[Seed]] = {
    "sagemaker-request": [
        Seed(
            "a longer limit is accepted",
            _change(CREATE, "StoppingCondition/MaxRuntimeInSeconds", "scale", 2, at="request"),
            "accepted request",
            r"StoppingCondition.MaxRuntimeInSeconds: \d+, accepted \d+",
        ),
        Seed(
            "a tag is dropped",
            _change(CREATE, "Tags/0", "drop", at="request"),
            "accepted request",
            "left_out: expected none, came Tags.cloudtrain:job",
        ),
        Seed(
            "a text is cut",
            _change(DESCRIBE, "AlgorithmSpecification/TrainingImage", "cut", 20),
            "accepted request",
            r"AlgorithmSpecification.TrainingImage: \d+ characters, accepted 20 characters",
        ),
        Seed("a line is lost", _set(log_lost=LINE.format(7)), "log lines", r"lost: expected 0, came [1-9]"),
        Seed(
            "the bill is rounded up to minutes",
            _change(DESCRIBE, "BillableTimeInSeconds", "up", 120),
            "bill",
            r"billed_off_s: expected least: -1, most: 1, came \d+",
        ),
        Seed(
            "an artifact has another byte", _set(artifact_damage="rank-*"), "artifacts", "damaged: expected 0, came 2"
        ),
    ],
    "sagemaker-answers": [
        Seed(
            "another machine type is accepted",
            _change(CREATE, "ResourceConfig/InstanceType", "set", "ml.m5.4xlarge", at="request"),
            "accepted request",
            "InstanceType: ml.m5.large, accepted ml.m5.4xlarge",
        ),
        Seed(
            "lines have a time in another zone",
            _change("GetLogEvents", "events/*/timestamp", "shift", 3_600_000),
            "log lines",
            r"stamp_off_s: expected least: -15, most: 15, came 3[56]\d\d",
        ),
        Seed("a line comes twice", _set(log_doubled=LINE.format(8)), "log lines", r"twice: expected 0, came [1-9]"),
        Seed(
            "the bill is rounded down to minutes",
            _change(DESCRIBE, "BillableTimeInSeconds", "down", 60),
            "bill",
            r"billed_off_s: expected least: -1, most: 1, came -\d+",
        ),
        Seed(
            "a state has an unknown word",
            _change(DESCRIBE, "SecondaryStatusTransitions/*/Status", "word", {"Uploading": "Packing"}),
            "platform states",
            "unknown: expected none, came Packing",
        ),
        Seed(
            "the start is told in another zone",
            _change(DESCRIBE, "TrainingStartTime", "shift", -18_000),
            "bill",
            r"clock_off_s: expected least: -15, most: 15, came -1[78]\d\d\d",
        ),
    ],
    "sagemaker-ends": [
        Seed(
            "a stop ends as failed", _set(stop_ends="failed"), "stop with save", "state: expected stopped, came failed"
        ),
        Seed(
            "a state comes twice",
            _change(DESCRIBE, "SecondaryStatusTransitions/*/Status", "word", {"Downloading": "Starting"}),
            "platform states",
            "back: expected none, came Starting after Starting",
        ),
        Seed(
            "the billed count is missing",
            _change(DESCRIBE, "BillableTimeInSeconds", "drop"),
            "bill",
            r"uncounted: expected 0, came [123]",
        ),
        Seed(
            "the end is told late",
            _change(DESCRIBE, "TrainingEndTime", "shift", 3600),
            "bill",
            r"clock_off_s: expected least: -15, most: 15, came 3\d\d\d",
        ),
    ],
    "sagemaker-later": [
        Seed(
            "the second and the third request get longer limits",
            _change(CREATE, "StoppingCondition/MaxRuntimeInSeconds", "scale", 3, at="request", after=1),
            "accepted request",
            r"StoppingCondition.MaxRuntimeInSeconds: \d+, accepted 3600",
        ),
        Seed(
            "the start is told a minute late",
            _change(DESCRIBE, "TrainingStartTime", "shift", 70),
            "bill",
            r"clock_off_s: expected least: -15, most: 15, came [3-7]\d",
        ),
    ],
    "sagemaker-kill": [
        Seed(
            "a rank's kill ends the container",
            _set(kill_at=LINE.format(19)),
            "kill of a rank",
            "starts: expected 2, came 1",
        )
    ],
    "sagemaker-code": [
        Seed(
            "the stop has an odd error code",
            _fault("StopTrainingJob", "error", code="TeapotException", message="short and stout", count=1),
            "status",
            "TeapotException|short and stout",
        )
    ],
    "sagemaker-list": [
        Seed(
            "the store lists a fresh object late",
            lambda double: None,  # by the same setting
            "stop with save",
            "resumable: expected True, came False",
        ),
        Seed("the store lists a removed object", _set(list_lag_s=12.0), "cleaning", "is still listed"),
    ],
    "azureml-request": [
        Seed(
            "an environment variable is cut",
            _change("jobs.get", "properties/environmentVariables/CLOUDTRAIN_ORDER", "cut", 64),
            "accepted request",
            r"properties.environmentVariables.CLOUDTRAIN_ORDER: \d+ characters, accepted 64 characters",
        ),
        Seed(
            "the instance count is changed",
            _change("jobs.get", "properties/resources/instanceCount", "set", 1),
            "accepted request",
            "resources.instanceCount: 2, accepted 1",
        ),
        Seed(
            "a state comes again",
            _change("jobs.get", "properties/status", "set", "Queued", after=5, count=1),
            "platform states",
            r"back: expected none, came Queued after \w+",
        ),
        Seed("the time limit comes early", _set(limit_factor=0.4), "time limit", "early_s: expected most: 5, came"),
        Seed("a stop gives no time to save", _set(grace_s=0.0), "stop with save", "undone: expected"),
        Seed(
            "the bill is rounded down",
            _change("run.details", "computeDuration", "set", "00:00:01"),
            "bill",
            "billed_off_s: expected least: -1, most: 1, came -",
        ),
    ],
    "azureml-late": [
        Seed("lines come late", _set(log_lag_s=55.0), "log lines", r"late_s: expected most: 15, came \d+"),
        Seed(
            "an unknown state",
            _change("jobs.get", "properties/status", "word", {"Running": "Warming"}),
            "platform states",
            "unknown: expected none, came Warming",
        ),
        Seed(
            "the bill is rounded up",
            _change("run.details", "computeDuration", "set", "00:10:00"),
            "bill",
            r"billed_off_s: expected least: -1, most: 1, came [3-5]\d\d",
        ),
    ],
    "azureml-stop": [
        Seed(
            "a stop ends as completed",
            _set(stop_ends="completed"),
            "stop with save",
            "expected stopped, came succeeded",
        ),
        Seed(
            "the start is before the creation",
            _change("run.details", "startTimeUtc", "shift", -300),
            "bill",
            r"clock_off_s: expected least: -15, most: 15, came -2\d\d",
        ),
    ],
    "vertex-request": [
        Seed(
            "a label is dropped",
            _change("jobs.create", "labels/cloudtrain_job", "drop", at="request"),
            "accepted request",
            "left_out: expected none, came labels.cloudtrain_job",
        ),
        Seed(
            "the limit is rounded to hours",
            _change("jobs.create", "jobSpec/scheduling/timeout", "up", 3600, at="request"),
            "accepted request",
            r"scheduling.timeout: \d+s, accepted 3600s",
        ),
        Seed(
            "the start is told in another zone",
            _change("jobs.get", "startTime", "shift", -7200),
            "bill",
            r"clock_off_s: expected least: -15, most: 15, came -[67]\d\d\d",
        ),
        Seed("lines are lost", _set(log_lost=LINE.format(21)), "log lines", r"lost: expected 0, came [1-9]"),
        Seed("an output file has another byte", _set(artifact_damage="rank-1.txt"), "artifacts", "damaged: expected 0"),
    ],
    "vertex-older": [
        Seed(
            "a job resumes from an older checkpoint",
            _set(restores_older=True),
            "resume",
            r"skipped: expected 0, came -\d+",
        ),
    ],
    "vertex-ends": [
        Seed(
            "a cancelled job is told as expired",
            _change("jobs.get", "state", "word", {"JOB_STATE_CANCELLED": "JOB_STATE_EXPIRED"}),
            "stop with save",
            "expected stopped, came failed|reason: expected user, came no_machines",
        ),
    ],
}


@pytest.mark.parametrize("run", RUNS)
def test_seeded_differences_are_found_and_named(request: pytest.FixtureRequest, selftest: Any, run: str) -> None:
    """The row of a step differs, and its words say what was expected and what came."""
    backend = run.partition("-")[0]
    double = request.getfixturevalue(FIXTURES[backend])
    for seed in RUNS[run]:
        seed.act(double)
    rows, screen = selftest(backend, is_slow=run.endswith("late"))  # so that late lines come before the end
    print(screen)
    missed = [seed for seed in RUNS[run] if not _is_named(seed, rows, screen)]
    assert not missed, "\n".join([*(f"{seed.name}: {seed.step}, {seed.words}" for seed in missed), screen])


def _is_named(seed: Seed, rows: Rows, screen: str) -> bool:
    below = re.search(rf"^ *differs +{seed.step} .*\n((?:    .*\n)*)", screen, re.MULTILINE)
    is_found = rows[seed.step]["verdict"] == "differs" and below is not None
    return is_found and re.search(seed.words, below[1]) is not None
