"""A job's config for people: the values set, a line for each key in a comparison, and no secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..backend_table import names
from ..planning.request_rules import shared_places

if TYPE_CHECKING:
    from ..config.schema import JobConfig
    from ..job import Job

MOST_NAMED = 5  # changed keys, in a line

HIDDEN = "(not shown)"
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")  # a part of a name: HF_TOKEN, api-key, accessKey
_SECRET = {
    *("key", "apikey", "token", "secret", "password", "passwd", "passphrase", "pwd", "pw", "credential"),
    *("credentials", "auth", "authorization", "bearer", "signature", "sas", "cookie", "dsn"),
}
_FLAG = re.compile(r"--?([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
_LOGIN = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]*(?=@)")
_QUERY = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s?#]*\?)[^\s#]+", re.IGNORECASE)


def shown(job: Job, *, set_only: bool = False) -> dict[str, Any]:
    """Return the config without empty values, blocks of unused backends, and possible secrets.

    A report may be sent to many people. So texts under names that look like a secret's are hidden at any depth, as are
    a login or a query in an address, and the addresses of `notify`, which grant access. `env:NAME` and the names under
    `secrets` are shown, since both are only names. A script does not use the defaults of the shared trainer's blocks;
    `set_only` leaves these defaults out for a task as well.
    """
    others = {*names(), "notify"} - {job.backend}
    config = {
        key: value if key == "secrets" else _open(value, is_secret=_is_secret(key))
        for key, value in shared_places(job.config, job.id).items()
        if key not in others
    }
    if job.asked.notify:
        config["notify"] = [_without_address(each) for each in job.asked.notify]
    if set_only or not job.config.get("task"):
        config = {key: _set(value, job.config[key], key) for key, value in config.items()}
    found = _filled(config)
    return found if isinstance(found, dict) else {}


def as_yaml(config: Mapping[str, Any]) -> str:
    """Return the config as YAML, in the order of the keys."""
    import yaml

    return str(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=100))


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the keys on which the configs differ, each with its value in every config; None if not set."""
    leaves = [dict(_leaves(config, "")) for config in configs]  # a list counts as a value
    keys = dict.fromkeys(key for each in leaves for key in each)
    rows = {key: [each.get(key) for each in leaves] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def differences(job: Job, *configs: JobConfig) -> str:
    """Return the keys in which the configs differ, with all values: `args: --lr 0.1 -> --lr 0.01`; no secrets."""
    found = differing([shown(replace(job, config=config.model_dump(mode="json"))) for config in configs])
    texts = [f"{key}: {' -> '.join(_text(value) for value in values)}" for key, values in found.items()]
    more = [f"{len(texts) - MOST_NAMED} more"] if len(texts) > MOST_NAMED else []
    return ", ".join([*texts[:MOST_NAMED], *more])


def _set(shown: Any, value: Any, block: str) -> Any:
    """Return a block of the shared trainer without its defaults; another block as it is."""
    from ..config.schema import JobConfig

    if block not in ("training", "checkpoint"):
        return shown
    defaults = JobConfig.model_fields[block].get_default(call_default_factory=True).model_dump(mode="json")
    return {key: each for key, each in shown.items() if value[key] != defaults.get(key)}


def _text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "-" if value is None else str(value)


def _leaves(value: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    """Yield each value with its dotted key."""
    for key, each in value.items():
        if isinstance(each, Mapping):
            yield from _leaves(each, f"{before}{key}.")
        else:
            yield f"{before}{key}", each


def _filled(value: Any) -> Any:
    """Return the value without empty members."""
    if isinstance(value, dict):
        kept = {key: _filled(each) for key, each in value.items()}
        return {key: each for key, each in kept.items() if each not in (None, {}, [], "")}
    if isinstance(value, list):
        return [_filled(each) for each in value]
    return value


def _is_secret(name: object) -> bool:
    return any(word.lower() in _SECRET for word in _WORD.findall(str(name)))


def _open(value: Any, *, is_secret: bool = False) -> Any:
    """Return the value without possible secrets, detected by the name and the form of each part."""
    if isinstance(value, dict):
        return {key: _open(each, is_secret=is_secret or _is_secret(key)) for key, each in value.items()}
    if isinstance(value, list):
        flags = [_FLAG.fullmatch(each) if isinstance(each, str) else None for each in [None, *value]]
        # `--api-key VALUE` are two items of a list.
        return [
            _open(each, is_secret=is_secret or bool(flag and flag[2] is None and _is_secret(flag[1])))
            for flag, each in zip(flags, value, strict=False)
        ]
    if not isinstance(value, str) or value.startswith("env:"):
        return value
    if is_secret:
        return HIDDEN
    if (flag := _FLAG.fullmatch(value)) and flag[2] is not None and _is_secret(flag[1]):
        return f"{value.partition('=')[0]}={HIDDEN}"
    return _QUERY.sub(rf"\1{HIDDEN}", _LOGIN.sub(HIDDEN, value))


def _without_address(channel: Any) -> Any:
    if not isinstance(channel, dict):
        return HIDDEN
    kept = ("on", "format", "name")
    return {
        key: value if key in kept or str(value).startswith("env:") or not isinstance(value, str) else HIDDEN
        for key, value in channel.items()
    }
