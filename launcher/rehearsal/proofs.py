"""What has been proven of a job: that this code with this config saves when it is interrupted, and goes on.

A proof is of a backend, an archive and the part of the config that the training depends on. It is no proof of other
numbers of machines, of other names, money or places.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.launcher.errors import ConfigError, Fault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cloudtrain.launcher.config.schema import Config
    from cloudtrain.launcher.database import Database
    from cloudtrain.launcher.prepare import Prepared

__all__ = ["Proof", "find", "notes", "require", "store"]

_RELEVANT = {"task", "script", "module", "args", "params", "training", "env", "checkpoint"}
_OF_CHECKPOINT = ("every_steps", "every", "keep", "keep_best", "blocking", "resume")  # not where they are kept
DEFAULT_FILE = "cloudtrain.yaml"
PREEMPT_AT = 3  # in the command that is told: early, so that the proof is quick


@dataclass(frozen=True)
class Proof:
    """When it was proven, and the verdict in a sentence."""

    ended_s: float
    words: str


def store(database: Database, backend: str, bundle_sha256: str, config: Config, verdict: dict[str, Any]) -> None:
    """Keep what a rehearsal has proven, in place of what was known of the same code and config."""
    values = (_key(backend, config, bundle_sha256), time.time(), json.dumps(verdict))
    with database.transaction():
        database.execute("INSERT OR REPLACE INTO rehearsals (key, ended_s, verdict) VALUES (?, ?, ?)", values)


def find(database: Database, backend: str, bundle_sha256: str, config: Config) -> Proof | None:
    """Return the proof for this very code and config, None where there is none."""
    return _newest(database, _key(backend, config, bundle_sha256))


def require(database: Database, prepared: Prepared) -> None:
    """Raise ConfigError where the job is to run on spot machines and its resume was never proven."""
    why = _missing(database, prepared)
    if why is None:
        return
    hint = f"`{_command(prepared)}` proves it here, in seconds and for nothing; --force sends it as it is"
    raise ConfigError([Fault(f"spot machines, and {why}", key="resources.spot", hint=hint)])


def notes(prepared: Prepared) -> Iterator[str]:
    """Yield what a dry run says of it, which asks nobody and makes nothing."""
    if not _is_spot(prepared):
        return
    database = _there()
    why = _missing(database, prepared)
    if why is not None:
        yield f"resources.spot: {why}; submit wants `{_command(prepared)}` before, or --force"
        return
    assert database is not None
    proof = find(database, prepared.config.backend, prepared.bundle.sha256, prepared.config)
    assert proof is not None
    yield f"resources.spot: its resume was rehearsed on {_day(proof)}: {proof.words}"


def _there() -> Database | None:
    """Return the home's database, None where there is none yet."""
    from cloudtrain.launcher.database import Database
    from cloudtrain.launcher.home import where

    folder = where()
    return Database(folder) if (folder / "registry.sqlite").exists() else None


def _day(proof: Proof) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(proof.ended_s))


def _missing(database: Database | None, prepared: Prepared) -> str | None:
    """Return why the resume of the job is not proven; None where it is, or where nothing takes its machines away."""
    config, sha256 = prepared.config, prepared.bundle.sha256
    never = f"nothing has proven that this job saves and goes on when {config.backend} takes them away"
    if not _is_spot(prepared):
        return None
    if database is None:
        return never
    if find(database, config.backend, sha256, config) is not None:
        return None
    older = _newest(database, f"{config.backend}:{_config_hash(config)}:%")
    if older is not None:
        return f"the code has changed since its resume was proven ({_day(older)})"
    if _newest(database, f"{config.backend}:%:{sha256}") is not None:
        return "the training's settings have changed since its resume was proven"
    return never


def _is_spot(prepared: Prepared) -> bool:
    return prepared.config.resources.spot and "resources.spot" in prepared.request.carried


def _command(prepared: Prepared) -> str:
    from shlex import quote

    config, file = prepared.config, str(prepared.config_file)
    most = config.training.max_steps if config.task is not None else None
    at = PREEMPT_AT if most is None else max(1, min(PREEMPT_AT, most - 2))
    named = "" if file == DEFAULT_FILE else f" -f {quote(file)}"
    return f"cloudtrain rehearse{named} --backend {config.backend} --preempt-at {at}"


def _key(backend: str, config: Config, bundle_sha256: str) -> str:
    return f"{backend}:{_config_hash(config)}:{bundle_sha256}"


def _config_hash(config: Config) -> str:
    told = config.model_dump(mode="json", include=_RELEVANT)
    told["checkpoint"] = {key: told["checkpoint"][key] for key in _OF_CHECKPOINT}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:24]


def _newest(database: Database, pattern: str) -> Proof | None:
    sql = "SELECT ended_s, verdict FROM rehearsals WHERE key LIKE ? ORDER BY ended_s DESC LIMIT 1"
    rows = database.execute(sql, (pattern,))
    return None if not rows else Proof(rows[0]["ended_s"], str(json.loads(rows[0]["verdict"]).get("words", "")))
