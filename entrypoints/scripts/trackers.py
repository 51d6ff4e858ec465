"""The job's run at a tracker: its link in the printed lines, and MLflow's run of an earlier start.

W&B and MLflow print `View run at LINK` or `View run NAME at: LINK`, MLflow by itself at the end alone. W&B goes on in a
run by variables (worker.py); MLflow makes the ids of runs, so the job's run is found by the tag that the worker sets.
Only the first run of a start goes on: a script that makes several has several.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import events
from ..format import address

SIGN = "View run "
TAG = "cloudtrain.job"


def event_of(line: str) -> str:
    """Return the machine's part of a line with the link of a run; empty for other lines."""
    url = address(line.partition(SIGN)[2])
    return events.format_line("tracker", "", {"url": url}) if url else ""


def use_once(module: Any) -> None:
    """Have only the first run of this process be the job's run at W&B: W&B would use the id of its variable again."""
    init = module.init

    @functools.wraps(init)
    def begun(*args: Any, **options: Any) -> Any:
        run = init(*args, **options)
        with contextlib.suppress(Exception):  # another version
            settings = module.wandb_setup.singleton().settings
            if run.id == settings.run_id == os.environ["CLOUDTRAIN_JOB"]:
                settings.run_id = None
        return run

    module.init = begun


def go_on(module: ModuleType) -> None:
    """Have the first run of this start be the job's run of an earlier start, if the tracking server has one."""
    client = module.MlflowClient
    create = client.create_run

    def created(self: Any, experiment_id: str, start_time: Any = None, tags: Any = None, run_name: Any = None) -> Any:
        if TAG not in (tags or {}) or "mlflow.parentRunId" in tags:
            return create(self, experiment_id, start_time, tags, run_name)
        client.create_run, run = create, None
        with contextlib.suppress(Exception):  # a server that cannot search, or a new version: the run is a new one
            run = _found(self, experiment_id)
        run = run or create(self, experiment_id, start_time, tags, run_name)
        with contextlib.suppress(Exception):
            self._tracking_client._log_url(run.info.run_id)
        return run

    client.create_run = created


def _found(client: Any, experiment_id: str) -> Any:
    """Return the job's first run, to go on, or None. Its parameters keep their values: MLflow refuses a change."""
    wanted = f"tags.`{TAG}` = '{os.environ['CLOUDTRAIN_JOB']}'"
    runs = client.search_runs([experiment_id], wanted, max_results=1, order_by=["attributes.start_time ASC"])
    if not runs:
        return None
    earlier, known, store = runs[0].info.run_id, runs[0].data.params, client._tracking_client.store
    log_param = store.log_param

    def is_new(run_id: str, param: Any) -> bool:
        return run_id != earlier or param.key not in known

    store.log_param = lambda run_id, param: log_param(run_id, param) if is_new(run_id, param) else None

    def without_known(log: Callable[..., Any]) -> Callable[..., Any]:
        return lambda run_id, metrics, params, tags: log(
            run_id, metrics, [param for param in params if is_new(run_id, param)], tags
        )

    for name in {"log_batch", "log_batch_async"} & {*dir(store)}:
        setattr(store, name, without_known(getattr(store, name)))
    client.update_run(earlier, status="RUNNING")
    return client.get_run(earlier)
