"""A job's config as a report shows it: what was set, one line a key where two are compared, and no secret."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloudtrain.launcher.job import Job

__all__ = ["HIDDEN", "as_yaml", "differing", "flat", "shown"]

HIDDEN = "(not shown)"
_BACKENDS = frozenset({"local", "ssh", "sagemaker", "azureml", "vertex"})  # blocks of the config
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")  # of a name: HF_TOKEN, api-key, accessKey
_SECRET = frozenset(
    {
        *("key", "apikey", "token", "secret", "password", "passwd", "passphrase", "pwd", "pw", "credential"),
        *("credentials", "auth", "authorization", "bearer", "signature", "sas", "cookie", "dsn"),
    }
)
_FLAG = re.compile(r"--?([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
_LOGIN = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]*(?=@)")
_QUERY = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s?#]*\?)[^\s#]+", re.IGNORECASE)


def shown(job: Job) -> dict[str, Any]:
    """Return the config without what is empty, without other backends' blocks, and without what may be a secret.

    A report is sent around: texts whose names look like a secret's stay at home, wherever they stand, what an address
    has of a login or a query, and the addresses of `notify`, which are keys in themselves. `env:NAME` is shown, since
    it is a name, and the names under `secrets`.
    """
    config = {
        key: value if key == "secrets" else _open(value, is_secret=_is_secret(key))
        for key, value in job.config.items()
        if key == job.backend or key not in _BACKENDS | {"notify"}
    }
    if job.config.get("notify"):
        config["notify"] = [_without_address(each) for each in job.config["notify"]]
    found = _filled(config)
    return found if isinstance(found, dict) else {}


def as_yaml(config: Mapping[str, Any]) -> str:
    """Return it as YAML, in the order of the keys."""
    import yaml

    return str(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=100))


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return each value by its dotted key; lists are values."""
    return dict(_leaves(config, ""))


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the keys on which these differ, each with its value in every one; None where it is not set."""
    leaves = [flat(config) for config in configs]
    keys = dict.fromkeys(key for each in leaves for key in each)
    rows = {key: [each.get(key) for each in leaves] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def _leaves(value: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for key, each in value.items():
        if isinstance(each, Mapping):
            yield from _leaves(each, f"{before}{key}.")
        else:
            yield f"{before}{key}", each


def _filled(value: Any) -> Any:
    """Return the value without members that say nothing."""
    if isinstance(value, dict):
        kept = {key: _filled(each) for key, each in value.items()}
        return {key: each for key, each in kept.items() if each not in (None, {}, [], "")}
    if isinstance(value, list):
        return [_filled(each) for each in value]
    return value


def _is_secret(name: object) -> bool:
    return any(word.lower() in _SECRET for word in _WORD.findall(str(name)))


def _open(value: Any, *, is_secret: bool = False) -> Any:
    """Return the value without what may be a secret, by the name that it has and by its form."""
    if isinstance(value, dict):
        return {key: _open(each, is_secret=is_secret or _is_secret(key)) for key, each in value.items()}
    if isinstance(value, list):
        flags = [_FLAG.fullmatch(each) if isinstance(each, str) else None for each in [None, *value]]
        # `--api-key VALUE` are two words of a list.
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
