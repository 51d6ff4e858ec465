"""The job's run at a tracker: the link in the printed lines, and MLflow's run of an earlier start."""

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cloudtrain.entrypoints import events
from cloudtrain.entrypoints.scripts import trackers
from cloudtrain.entrypoints.scripts.steps import Steps

LINES = {  # as wandb 0.31 and mlflow 3.17 print
    "wandb: 🚀 View run at https://wandb.ai/me/p/runs/x1": "https://wandb.ai/me/p/runs/x1",
    "wandb: 🚀 View run vivid-sun-2 at: https://wandb.ai/me/p/runs/x1?apiKey=abc": "https://wandb.ai/me/p/runs/x1",
    "🏃 View run cat-1 at: http://me:pw@host:5000/#/experiments/1/runs/f0": "http://host:5000/#/experiments/1/runs/f0",
    "🧪 View experiment at: http://host:5000/#/experiments/1": None,
    "wandb: ⭐️ View project at https://wandb.ai/me/p": None,
    "View run x at: javascript:alert(1)": None,
    "View run x at: file:///etc/passwd": None,
    "View run step 3 loss 1.0": None,
}


@pytest.mark.parametrize(("line", "url"), LINES.items())
@pytest.mark.parametrize("rank", [0, 1])
def test_printed_link_becomes_an_event_of_rank_0(rank: int, line: str, url: str | None) -> None:
    """Only web addresses count, without the user, the password and the query."""
    tail, _ = Steps(rank, {}).take(line)
    _, event = events.parse(tail)
    told = event["url"] if event and event["e"] == "tracker" else None
    assert told == (url if rank == 0 else None)


@dataclass
class Server:
    """Behaves as MLflow's store: parameters cannot change, and a run is found by its tags, the first run first."""

    runs: dict[str, Any] = field(default_factory=dict)

    def log_batch(self, run_id: str, metrics: Any, params: Any, tags: Any) -> None:
        """Log the parameters."""
        for param in params:
            self.log_param(run_id, param)

    def log_batch_async(self, run_id: str, metrics: Any, params: Any, tags: Any) -> Any:
        """Log the parameters at once, as the other thread would; Hugging Face's callback logs so."""
        Server.log_batch(self, run_id, metrics, params, tags)
        return SimpleNamespace(wait=lambda: None)

    def log_param(self, run_id: str, param: Any) -> None:
        """Log a parameter; refuse a change."""
        known = self.runs[run_id].data.params
        if known.setdefault(param.key, param.value) != param.value:
            raise ValueError("Changing param values is not allowed")


def double() -> ModuleType:
    """Return a module with a client of one server, by MLflow's names."""
    server = Server()

    class MlflowClient:
        def __init__(self, tracking_uri: str) -> None:
            self._tracking_client = SimpleNamespace(store=server, _log_url=lambda run_id: print(f"View run {run_id}"))

        def create_run(self, experiment_id: str, start_time: Any = None, tags: Any = None, run_name: Any = None) -> Any:
            info = SimpleNamespace(run_id=f"r{len(server.runs)}", status="RUNNING", at=experiment_id)
            server.runs[info.run_id] = SimpleNamespace(info=info, data=SimpleNamespace(params={}, tags=tags or {}))
            return server.runs[info.run_id]

        def search_runs(self, ids: list[str], wanted: str, max_results: int, order_by: list[str]) -> list[Any]:
            runs = (run for run in server.runs.values() if run.info.at in ids)
            return [run for run in runs for n, v in run.data.tags.items() if wanted == f"tags.`{n}` = '{v}'"][:1]

        def update_run(self, run_id: str, status: str) -> None:
            server.runs[run_id].info.status = status

        def get_run(self, run_id: str) -> Any:
            return server.runs[run_id]

        def set_terminated(self, run_id: str) -> None:
            server.runs[run_id].info.status = "FINISHED"

    made = ModuleType("mlflow.tracking.client")
    made.MlflowClient = MlflowClient  # type: ignore[attr-defined]
    return made


def library(name: str) -> Any:
    """Return the double, or MLflow itself where it is installed."""
    return double() if name == "double" else pytest.importorskip(name, reason="MLflow is in no extra")


@pytest.mark.filterwarnings("ignore")  # of MLflow's own libraries
@pytest.mark.parametrize("name", ["double", "mlflow.tracking.client"])
def test_mlflow_goes_on_in_the_jobs_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run of a start goes on, others are new; a parameter keeps its value; another job has its own."""
    module = library(name)
    client, logged = module.MlflowClient(f"sqlite:///{tmp_path}/ml.db"), []
    for job, value in (("digits-abcde", "1"), ("digits-abcde", "2"), ("other-abcde", "3")):
        monkeypatch.setenv("CLOUDTRAIN_JOB", job)
        monkeypatch.setattr(module.MlflowClient, "create_run", module.MlflowClient.create_run)
        trackers.go_on(module)
        tags = {trackers.TAG: job}
        ids = [client.create_run("0", tags=given).info.run_id for given in (tags, tags, {})]
        store, param = client._tracking_client.store, SimpleNamespace(key="begin", value=value)
        if name != "double":
            from mlflow.entities import Param

            param = Param("begin", value)
        store.log_batch(ids[0], metrics=[], params=[param], tags=[])
        store.log_batch_async(ids[0], metrics=[], params=[param], tags=[]).wait()
        store.log_param(ids[0], param)
        run = client.get_run(ids[0])
        logged.append((ids, run.data.params["begin"], run.info.status))
        client.set_terminated(ids[0])
    (first, *_), (again, *_), (others, *_) = logged
    assert first[0] == again[0]
    assert [each[1:] for each in logged] == [("1", "RUNNING"), ("1", "RUNNING"), ("3", "RUNNING")]
    assert len({*first, *again, *others}) == 8


def wandb_double() -> Any:
    """Return a module by W&B's names, whose settings read the variables once."""
    settings, made = SimpleNamespace(run_id="j"), ModuleType("wandb.sdk.wandb_init")
    made.wandb_setup = SimpleNamespace(singleton=lambda: SimpleNamespace(settings=settings))  # type: ignore[attr-defined]
    ids = iter("abc")
    made.init = lambda id=None: SimpleNamespace(id=id or settings.run_id or next(ids))  # type: ignore[attr-defined]
    return made


def test_only_the_first_wandb_run_of_a_start_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that makes several runs has several; an id of its own uses nothing up; a new version is left alone."""
    monkeypatch.setenv("CLOUDTRAIN_JOB", "j")
    trackers.use_once(module := wandb_double())
    assert [module.init(id=own).id for own in ("mine", None, None, None)] == ["mine", "j", "a", "b"]
    other = wandb_double()
    monkeypatch.delattr(other, "wandb_setup")
    trackers.use_once(other)
    assert [other.init().id, other.init().id] == ["j", "j"]


def test_a_server_that_cannot_search_makes_a_new_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the search never ends a script."""
    module = double()
    monkeypatch.setenv("CLOUDTRAIN_JOB", "j")
    monkeypatch.delattr(module.MlflowClient, "search_runs")
    trackers.go_on(module)
    assert module.MlflowClient("").create_run("0", None, {trackers.TAG: "j"}).info.run_id == "r0"
