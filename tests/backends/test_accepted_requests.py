"""Each cloud's own record of a job's request: nothing differs, and a change by the platform is found and named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from wholejobs import SETTINGS

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.backend import Request, accepted
from cloudtrain.launcher.job import platform_name
from cloudtrain.launcher.selftest import planned
from cloudtrain.launcher.store.registry import Registry
from doubles.kit.handle import Handle

FIXTURES = {"sagemaker": "account", "azureml": "azure_account", "vertex": "google_project"}
COUNTS = {"sagemaker": 4, "azureml": 4, "vertex": 6}  # of changed and left out values
CREATES = {"sagemaker": "CreateTrainingJob", "azureml": "jobs.put", "vertex": "jobs.create"}
ENV = "jobSpec/workerPoolSpecs/*/containerSpec"
# Backend, path in the request, change, value; the words of the comparison.
CHANGES = {
    "sagemaker": [
        (
            "StoppingCondition/MaxRuntimeInSeconds",
            "scale",
            2,
            "changed StoppingCondition.MaxRuntimeInSeconds: 3600, accepted 7200",
        ),
        ("Tags/0", "drop", None, "left out Tags.cloudtrain:job"),
        ("ResourceConfig/InstanceCount", "set", 1, "ResourceConfig.InstanceCount: 2, accepted 1"),
        ("ResourceConfig/InstanceType", "set", "ml.m5.large", "InstanceType: ml.m5.xlarge, accepted ml.m5.large"),
        ("OutputDataConfig/KmsKeyId", "set", "1234", "added OutputDataConfig.KmsKeyId"),
    ],
    "azureml": [
        ("properties/limits/timeout", "set", "PT2H", "properties.limits.timeout: PT1H, accepted PT2H"),
        ("properties/tags/cloudtrain.job", "drop", None, "left out properties.tags.cloudtrain.job"),
        ("properties/environmentVariables/CLOUDTRAIN_ORDER", "cut", 90, "CLOUDTRAIN_ORDER"),
        ("properties/resources/instanceCount", "set", 1, "properties.resources.instanceCount: 2, accepted 1"),
    ],
    "vertex": [
        ("jobSpec/scheduling/timeout", "down", 1000, "jobSpec.scheduling.timeout: 3600s, accepted 3000s"),
        ("labels/cloudtrain_job", "drop", None, "left out labels.cloudtrain_job"),
        (f"{ENV}/args/0", "cut", 9, "containerSpec.args.0"),
        (
            "jobSpec/workerPoolSpecs/*/machineSpec/machineType",
            "set",
            "n1-standard-8",
            "machineType: n1-standard-4, accepted n1-standard-8",
        ),
    ],
}


@pytest.fixture
def compared(request: pytest.FixtureRequest, home: Path, tmp_path: Path) -> Callable[[str, Handle], dict[str, Any]]:
    """Return a function that sends a job without containers, and compares its request with the platform's record."""

    def compare(backend: str, double: Handle) -> dict[str, Any]:
        double.settings(execute=False)
        folder = tmp_path / "project"
        folder.mkdir()
        (folder / "loop.py").write_text("print('x')\n")
        more = "name: j\nscript: loop.py\nlimits: {max_duration: 1h}\nenv: {GREETING: hello}\n"
        (folder / "cloudtrain.yaml").write_text(more + SETTINGS[backend].replace("limits: {max_duration: 50m}\n", ""))
        run = request.getfixturevalue("vertex" if backend == "vertex" else "cli")
        done = run("submit", "-d", "-y", "--name", "j", cwd=folder)
        assert done.code == 0, done.stderr
        registry = Registry(home)
        attempt = registry.find("j").attempt
        registry.close()
        sent = Request.load(platform_name("j", 1), attempt.request)
        told = backends.load(backend).accepted(sent, attempt.ref)
        assert accepted.of_words([told.words], planned.read("steps.yaml")["stages"][backend])["unknown"] == []
        return accepted.of_requests([told])

    return compare


@pytest.mark.soak  # test_change_by_the_platform_is_named finds no more than the seeded changes
@pytest.mark.parametrize("backend", FIXTURES)
def test_platform_accepts_the_request_unchanged(request: pytest.FixtureRequest, compared: Any, backend: str) -> None:
    """Ids in another case, durations in another unit, numbers as texts and what a send adds are no differences."""
    came = compared(backend, request.getfixturevalue(FIXTURES[backend]))
    assert (came["changed"], came["left_out"]) == ([], []), came
    assert came["keys"] > 15


@pytest.mark.parametrize("backend", FIXTURES)
def test_change_by_the_platform_is_named(request: pytest.FixtureRequest, compared: Any, backend: str) -> None:
    """A limit, a tag, a variable, a count or a type that the platform changes is found, each at its key."""
    double = request.getfixturevalue(FIXTURES[backend])
    for path, how, value, _ in CHANGES[backend]:
        double.change(CREATES[backend], path, how, value, at="request")
    came = compared(backend, double)
    assert len(came["changed"] + came["left_out"]) == COUNTS[backend], came
    told = [f"{name.replace('_', ' ')} {each}" for name in ("changed", "left_out", "added") for each in came[name]]
    for *_, words in CHANGES[backend]:
        assert any(words in each for each in told), "\n".join([words, *told])
