"""From a prepared job to a running one: journal the intent, send, mark as sent.

The platform's name for the job is fixed in the journal, so a process that dies anywhere leaves at most one job, and
`refresh` finds it by that name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.launcher import backend as backends
from cloudtrain.launcher.errors import CloudtrainError, ConfigError, Fault
from cloudtrain.launcher.job import Attempt, Job, State
from cloudtrain.launcher.refresh import refresh
from cloudtrain.launcher.registry import Registry, this_process

if TYPE_CHECKING:
    from cloudtrain.launcher.config.schema import Config
    from cloudtrain.launcher.prepare import Prepared

__all__ = ["resend", "send"]


def send(
    registry: Registry,
    prepared: Prepared,
    *,
    name: str | None = None,
    key: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Job, bool]:
    """Journal and send the job; return it, and False where the idempotency key named one that exists.

    Raises UsageError where `name` is taken, ConfigError for a secret that is not set, and what the backend raises.
    """
    secrets = _secrets(prepared.config, environ)
    config = prepared.config
    if key is not None and (known := registry.with_key(key)) is not None:
        refresh(registry, known)  # where a submit has died and sent nothing, the key is free again

    def make(job_id: str, number: int) -> Job:
        request = prepared.backend.request(prepared.plan, config, job_id, number, prepared.bundle.sha256)
        return Job(
            id=job_id,
            name=config.name,
            backend=config.backend,
            created_s=time.time(),
            config=config.model_dump(mode="json"),
            config_file=str(prepared.config_file.absolute()),
            bundle=prepared.bundle.dump(),
            attempt=_intent(job_id, number, prepared, request),
            idempotency_key=key,
        )

    job, is_new = registry.add(name or config.name, make, exclusive=name is not None, key=key)
    if not is_new:
        return job, False
    return _send(registry, job, prepared, secrets), True


def resend(registry: Registry, job: Job, prepared: Prepared, environ: Mapping[str, str] = os.environ) -> Job:
    """Journal and send the job's next attempt, which goes on from its newest checkpoint."""
    secrets = _secrets(prepared.config, environ)
    number = job.attempt.number + 1
    request = prepared.backend.request(prepared.plan, prepared.config, job.id, number, prepared.bundle.sha256)
    attempt = _intent(job.id, number, prepared, request)
    config, bundle = prepared.config.model_dump(mode="json"), prepared.bundle.dump()
    registry.add_attempt(attempt, config, bundle)
    return _send(registry, replace(job, attempt=attempt, config=config, bundle=bundle), prepared, secrets)


def _intent(job_id: str, number: int, prepared: Prepared, request: backends.Request) -> Attempt:
    return Attempt(job_id, number, "intent", prepared.plan.dump(), request.dump(), time.time(), this_process())


def _send(registry: Registry, job: Job, prepared: Prepared, secrets: Mapping[str, str]) -> Job:
    attempt = job.attempt
    request = backends.Request.load(attempt.name, attempt.request)
    shipment = backends.Shipment(prepared.bundle, registry.folder, Path(job.config_file).parent, secrets)
    try:
        ref = prepared.backend.send(request, shipment)
    except CloudtrainError as error:
        # The backend refused: the attempt is over, with its reason. What it did not answer stays an intent.
        if error.exit_code == 7:
            registry.release(attempt)
            raise
        state = State("failed", "error", detail=f"not sent: {error.message}", ended_s=time.time())
        registry.mark_never_sent(attempt, state)
        raise
    except BaseException:  # this process may live on, and follow
        registry.release(attempt)
        raise
    registry.mark_sent(attempt, ref)
    return replace(job, attempt=replace(attempt, phase="sent", ref=ref))


def _secrets(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    missing = [name for name in config.secrets if name not in environ]
    if missing:
        raise ConfigError(
            [
                Fault(f"the secret `{name}` is not set in your environment", key="secrets", hint=f"export {name}=...")
                for name in missing
            ]
        )
    return {name: environ[name] for name in config.secrets}
