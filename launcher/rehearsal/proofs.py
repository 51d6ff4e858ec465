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
    from cloudtrain.launcher.config.schema import Config
    from cloudtrain.launcher.database import Database
    from cloudtrain.launcher.prepare import Prepared

__all__ = ["Proof", "find", "note", "require", "store"]

_RELEVANT = {"task", "script", "module", "args", "params", "training", "env", "checkpoint"}
_OF_CHECKPOINT = ("every_steps", "every", "keep", "keep_best", "blocking", "resume")  # not where they are kept
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


def require(database: Database, prepared: Prepared, config_file: str) -> None:
    """Raise ConfigError where the job is to run on spot machines and its resume was never proven."""
    why = _missing(database, prepared)
    if why is None:
        return
    hint = (
        f"`{_command(prepared.config, config_file)}` proves it here, in seconds and for nothing; --force sends it all"
    )
    hint += " the same: then what spot machines lose is lost, and paid for"
    raise ConfigError([Fault(f"spot machines, and {why}", key="resources.spot", hint=hint)])


def note(database: Database, prepared: Prepared, config_file: str) -> str | None:
    """Return what a dry run says of it, None where there is nothing to say."""
    if not _is_spot(prepared):
        return None
    why = _missing(database, prepared)
    if why is not None:
        return f"resources.spot: {why}; submit asks for `{_command(prepared.config, config_file)}`, or for --force"
    proof = find(database, prepared.config.backend, prepared.bundle.sha256, prepared.config)
    assert proof is not None
    day = time.strftime("%Y-%m-%d", time.localtime(proof.ended_s))
    return f"resources.spot: its resume was rehearsed on {day}: {proof.words}"


def _missing(database: Database, prepared: Prepared) -> str | None:
    """Return why the resume of the job is not proven; None where it is, or where nothing takes its machines away."""
    config, sha256 = prepared.config, prepared.bundle.sha256
    if not _is_spot(prepared) or find(database, config.backend, sha256, config) is not None:
        return None
    older = _newest(database, f"{config.backend}:{_config_hash(config)}:%")
    if older is not None:
        day = time.strftime("%Y-%m-%d", time.localtime(older.ended_s))
        return f"the code has changed since its resume was proven ({day})"
    if _newest(database, f"{config.backend}:%:{sha256}") is not None:
        return "the training's settings have changed since its resume was proven"
    return f"nothing has proven that this job saves and goes on when {config.backend} takes them away"


def _is_spot(prepared: Prepared) -> bool:
    return prepared.config.resources.spot and "resources.spot" in prepared.request.carried


def _command(config: Config, config_file: str) -> str:
    from shlex import quote

    at = PREEMPT_AT if config.task is None else min(PREEMPT_AT, max(1, (config.training.max_steps or 9) - 2))
    file = "" if config_file == "cloudtrain.yaml" else f" -f {quote(config_file)}"
    return f"cloudtrain rehearse{file} --backend {config.backend} --preempt-at {at}"


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
