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
_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)


def shown(job: Job) -> dict[str, Any]:
    """Return the config without what is empty, without other backends' blocks, and without what may be a secret.

    A report is sent around: of `env` values whose names look like a secret's stay at home, and the addresses of
    `notify`, which are keys in themselves; `env:NAME` is shown, since it is a name.
    """
    config = {
        key: value
        for key, value in job.config.items()
        if key == job.backend or key not in _BACKENDS | {"env", "notify"}
    }
    if job.config.get("env"):
        config["env"] = {name: HIDDEN if _SECRET.search(name) else value for name, value in job.config["env"].items()}
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


def _without_address(channel: Any) -> Any:
    if not isinstance(channel, dict):
        return HIDDEN
    kept = ("on", "format", "name")
    return {
        key: value if key in kept or str(value).startswith("env:") or not isinstance(value, str) else HIDDEN
        for key, value in channel.items()
    }
