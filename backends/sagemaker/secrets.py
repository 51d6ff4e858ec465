"""A job's secrets in transit: encrypted parameters of AWS's store (SSM), until the job's end is seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cloudtrain.launcher.errors import ConfigError

from . import api
from .api import AwsAccess

MAX_BYTES = 4096  # of a standard parameter
_BATCH = 10


def put(access: AwsAccess, prefix: str, secrets: Mapping[str, str]) -> None:
    """Store the values below the prefix. Raises ConfigError if a value is too long."""
    for name, value in secrets.items():
        if len(value.encode()) > MAX_BYTES:
            message = f"the secret `{name}` has more than the {MAX_BYTES} bytes that SSM takes"
            raise ConfigError(message, key="secrets", hint="put it into a file of your own in S3")
    client = api.client(access, "ssm")
    with api.answers("store the job's secrets with SSM"):
        for name, value in secrets.items():
            client.put_parameter(Name=f"{prefix}/{name}", Value=value, Type="SecureString", Overwrite=True)


def remove(access: AwsAccess, prefix: str, names: Sequence[str]) -> None:
    """Remove the parameters that exist."""
    with api.answers("remove the job's secrets from SSM"):
        for at in range(0, len(names), _BATCH):
            paths = [f"{prefix}/{name}" for name in names[at : at + _BATCH]]
            api.client(access, "ssm").delete_parameters(Names=paths)
