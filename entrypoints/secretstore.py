"""Where a container finds its secrets: by name in the platform's own store, never in the request or a file of ours."""

from __future__ import annotations

from typing import Any

__all__ = ["SecretError", "fetch"]

_BATCH = 10  # the most that SSM gives at once


class SecretError(Exception):
    """A secret cannot be had; the message says which, and what to do."""


def fetch(where: dict[str, Any] | None) -> dict[str, str]:
    """Return the secrets by name. `where`: the store, the prefix of its keys and the names; None without secrets.

    Raises SecretError.
    """
    if not where or not where["names"]:
        return {}
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise SecretError(
            "the image lacks boto3, which reads the job's secrets: add it to the image, or leave `secrets` out"
        ) from error
    keys = {f"{where['prefix']}/{name}": name for name in where["names"]}
    paths = list(keys)
    found: dict[str, str] = {}
    try:
        client = boto3.client("ssm", region_name=where["region"])
        for at in range(0, len(paths), _BATCH):
            answer = client.get_parameters(Names=paths[at : at + _BATCH], WithDecryption=True)
            found |= {keys[item["Name"]]: item["Value"] for item in answer["Parameters"]}
    except (BotoCoreError, ClientError) as error:
        raise SecretError(
            f"the job's secrets cannot be read: {error}; the execution role needs ssm:GetParameters on "
            f"parameter{where['prefix']}/*"
        ) from error
    missing = sorted(set(where["names"]) - set(found))
    if missing:
        raise SecretError(f"the secrets {', '.join(missing)} are not below {where['prefix']} any more")
    return found
