"""Stored proofs that a job, with the same code and config, saves when interrupted, and resumes.

A proof belongs to a backend, to the shipped code, and to the config except keys that do not affect saving and resuming:
name, money, notices, the number and kind of machines, and the place of the data.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from shlex import join
from typing import Any

from cloudtrain.entrypoints.format import first_of

from ..backend_table import BUILT_IN
from ..config import DEFAULT_FILE
from ..config.schema import JobConfig
from ..errors import ConfigError, Fault
from ..planning import bundle, local_data, search_spec
from ..planning.prepare import Prepared
from ..store.database import Database
from ..store.home import where

_APART = {"name", "backend", "code", "resources", "limits", "budget", "project", "notify", "retry", "tags", "sweep"}
_APART |= {*BUILT_IN, "capacity"}
_APART_IN = {"distributed": ("nproc_per_node",), "checkpoint": ("uri", "export")}
_NAMES_OF = ("inputs", "outputs")  # names only, not addresses
_NOT_REPEATED = {"name", "resources.spot", "budget.limit"}  # in the suggested command
PREEMPT_AT = 3  # in the suggested command: early, so that the proof is quick
MOST_NAMES = 5  # of changed files in a message


@dataclass(frozen=True)
class Proof:
    """The time of the proof, the verdict in a sentence, and the hashes of the config's keys and of the code's files."""

    ended_s: float
    words: str
    settings: Mapping[str, str]
    files: Mapping[str, str]


def files_of(prepared: Prepared) -> dict[str, str]:
    """Return a hash of each file of the code folder, for `store`."""
    folder = prepared.config_file.parent / prepared.config.code.dir
    along = local_data.outside_code(prepared.config, prepared.config_file.parent)
    return bundle.digests(folder, (*prepared.config.code.exclude, *along), prepared.config_file)


def store(database: Database, code_sha256: str, config: JobConfig, words: str, files: Mapping[str, str]) -> None:
    """Store the proof for the config's backend; replace an earlier proof of the same code and config."""
    verdict = {
        "words": words,
        "settings": {name: _hash(value) for name, value in _settings(config).items()},
        "files": dict(files),
    }
    values = (_key(code_sha256, config), time.time(), json.dumps(verdict))
    with database.transaction():
        database.execute("INSERT OR REPLACE INTO rehearsals (key, ended_s, verdict) VALUES (?, ?, ?)", values)


def find(database: Database, code_sha256: str, config: JobConfig) -> Proof | None:
    """Return the proof for exactly the same code and config, or None."""
    return _newest(database, _key(code_sha256, config))


def is_needed(config: JobConfig) -> bool:
    """Return whether a submit needs a proof: for spot machines, and for a search that pauses a script's trials."""
    return config.resources.spot or _pauses_scripts(config)


def require(database: Database, prepared: Prepared) -> None:
    """Raise ConfigError if the job needs a proof, and its resume was never proven."""
    key, reason = _reason(prepared)
    if key and find(database, prepared.bundle.code_sha256, prepared.config) is None:
        hint = f"{_advice(prepared)} proves it here, in seconds and for nothing; --force sends it as it is"
        raise ConfigError([Fault(f"{reason}, and {_missing(database, prepared, key)}", key=key, hint=hint)])


def notes(prepared: Prepared) -> Iterator[str]:
    """Yield the notes of a dry run, which sends no request and creates no file."""
    key, _ = _reason(prepared)
    if not key:
        return
    database = Database(where()) if (where() / "registry.sqlite").exists() else None  # None before the first use
    proof = find(database, prepared.bundle.code_sha256, prepared.config) if database else None
    if proof is None:
        yield f"{key}: {_missing(database, prepared, key)}; submit wants {_advice(prepared)} before, or --force"
    else:
        yield f"{key}: its resume was rehearsed on {_day(proof)}: {proof.words}"


def _day(proof: Proof) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(proof.ended_s))


def _missing(database: Database | None, prepared: Prepared, key: str) -> str:
    """Return why the job's resume, which the key needs, is not proven."""
    config, sha256 = prepared.config, prepared.bundle.code_sha256
    never = f"no rehearsal has proven that this job resumes after {config.backend} reclaims the machines"
    if key == "sweep.algorithm":
        never = "no rehearsal has proven that the script resumes where it was interrupted"
    if database is None:
        return never
    if older := _newest(database, _key("%", config)):
        return _changed_code(older, prepared)
    if older := _newest(database, f"{config.backend}:%:{sha256}"):
        return f"other settings than today's were proven ({_day(older)}): {_apart(older, config)} has changed since"
    return never


def _changed_code(proof: Proof, prepared: Prepared) -> str:
    """Return the files that have changed since the proof, or that cloudtrain's own have changed."""
    since, now = f"since its resume was proven ({_day(proof)})", files_of(prepared)
    names = sorted(name for name in {*now, *proof.files} if now.get(name) != proof.files.get(name))
    if names:
        return f"the code has changed {since}: {first_of(names, MOST_NAMES)}"
    return f"cloudtrain's own code on the nodes has changed {since}"


def _reason(prepared: Prepared) -> tuple[str, str]:
    """Return the key that needs a proof, and the reason in words; empty texts if the job needs no proof."""
    if prepared.config.resources.spot and "resources.spot" in prepared.request.carried:
        return "resources.spot", "spot machines"
    if _pauses_scripts(prepared.config):
        return "sweep.algorithm", "the search pauses trials"
    return "", ""


def _pauses_scripts(config: JobConfig) -> bool:
    return config.sweep is not None and config.task is None and search_spec.pauses(config.model_dump(mode="json"))


def _advice(prepared: Prepared) -> str:
    """Return the command of a rehearsal, with the options given. The user knows when a script saves."""
    config, file = prepared.config, str(prepared.config_file)
    most = config.training.max_steps
    early = PREEMPT_AT if most is None else max(1, min(PREEMPT_AT, most - 2))
    at, more = (str(early), "") if config.task is not None else ("STEP", ", with a step after the script's first save,")
    named = [] if file == DEFAULT_FILE else ["-f", file]
    if config.script and not named and not prepared.config_file.exists():
        named = [config.script]
    kept = [each for each in prepared.settings if each.partition("=")[0].strip() not in _NOT_REPEATED]
    given = [word for each in kept for word in ("--set", each)]
    words = ["cloudtrain", "rehearse", *named, "--backend", config.backend, *given, "--preempt-at", at]
    return f"`{join(words)}`{more}"


def _key(code_sha256: str, config: JobConfig) -> str:
    return f"{config.backend}:{_hash(_settings(config))}:{code_sha256}"


def _settings(config: JobConfig) -> dict[str, Any]:
    """Return the config's values that a proof depends on: all except values known to have no effect."""
    settings = config.model_dump(mode="json", exclude=_APART)
    for name, keys in _APART_IN.items():
        settings[name] = {key: value for key, value in settings[name].items() if key not in keys}
    settings["checkpoint"]["mirror"] = settings["checkpoint"]["mirror"] is not None
    settings |= {name: sorted(settings[name]) for name in _NAMES_OF}
    own = getattr(config, config.backend, None)
    if own is not None:
        settings[config.backend] = own.model_dump(mode="json", exclude={"price_per_hour"})
    return settings


def _apart(proof: Proof, config: JobConfig) -> str:
    """Return the config's keys that have changed since the proof."""
    settings = _settings(config)
    names = [name for name, value in settings.items() if proof.settings.get(name) != _hash(value)]
    return ", ".join([*names, *(name for name in proof.settings if name not in settings)]) or "something"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]


def _newest(database: Database, pattern: str) -> Proof | None:
    sql = "SELECT ended_s, verdict FROM rehearsals WHERE key LIKE ? ORDER BY ended_s DESC LIMIT 1"
    rows = database.execute(sql, (pattern,))
    return Proof(rows[0]["ended_s"], **json.loads(rows[0]["verdict"])) if rows else None
