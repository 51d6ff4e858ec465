"""AWS's clients, and AWS's errors as cloudtrain's errors. The SDK is imported inside functions, on first use."""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.launcher.errors import (
    CapacityError,
    CloudtrainError,
    ConfigError,
    CredentialError,
    UnreachableError,
)
from cloudtrain.launcher.text.extras import install

if TYPE_CHECKING:
    from cloudtrain.backends.sagemaker.records import SageMakerRef, SageMakerSending

__all__ = [
    "AwsAccess",
    "answers",
    "client",
    "code_of",
    "is_expired",
    "is_refusal",
    "polls",
    "renew",
    "require_credentials",
]

CONNECT_S, READ_S = 10, 60
RENEW_S = 5.0

_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
_UNKNOWN_KEY = ("InvalidClientTokenId", "UnrecognizedClientException", "InvalidAccessKeyId", "SignatureDoesNotMatch")
_DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403", "AllAccessDisabled")
_NO_CAPACITY = ("ResourceLimitExceeded", "LimitExceededException", "InsufficientCapacity", "CapacityError")
_BUSY = (
    *("Throttling", "ThrottlingException", "ThrottledException", "RequestLimitExceeded", "TooManyRequestsException"),
    *("SlowDown", "RequestTimeout", "InternalFailure", "InternalServerError", "InternalError"),
    *("ServiceUnavailable", "ServiceUnavailableException", "500", "502", "503", "504"),
)

_renewed_s = -math.inf
_loaders: list[Any] = []  # botocore's loader, shared by all sessions: it caches the services' descriptions
_clients: dict[tuple[AwsAccess, str, bool], Any] = {}
_making = threading.Lock()


@dataclass(frozen=True)
class AwsAccess:
    """How to reach an account: the region, the profile of AWS's own config, addresses of services (service, url)."""

    region: str
    profile: str | None
    endpoints: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, data: SageMakerRef | SageMakerSending) -> AwsAccess:
        """Return the access for a job's handle or sending plan."""
        return cls(data.region, data.profile, tuple(sorted(data.endpoints.items())))


def client(access: AwsAccess, service: str, *, patient: bool = False) -> Any:
    """Return the service's client, made once; a `patient` client retries for minutes, for calls that no poll repeats.

    Raises ConfigError without the SDK, CredentialError without the profile.
    """
    key = (access, service, patient)
    with _making:  # the first of several threads makes the client, which takes a second
        if (known := _clients.get(key)) is None:
            known = _clients[key] = _new_client(access, service, patient=patient)
    return known


def require_credentials(access: AwsAccess) -> None:
    """Raise ConfigError without the SDK, CredentialError if the SDK finds no credentials; makes no call to AWS."""
    boto3, botocore = _sdk()
    with answers("start the training job"):
        if boto3.Session(profile_name=access.profile).get_credentials() is None:
            raise botocore.exceptions.NoCredentialsError


def renew() -> None:
    """Drop all clients, so that new clients read the credentials again; at most once in RENEW_S: it costs a second."""
    global _renewed_s
    if time.monotonic() - _renewed_s < RENEW_S:
        return
    _renewed_s = time.monotonic()
    _clients.clear()
    gc.collect()  # the clients' parts form reference cycles


def _new_client(access: AwsAccess, service: str, *, patient: bool) -> Any:
    boto3, botocore = _sdk()
    # Adaptive: AWS throttles CreateTrainingJob hard, and many submits must share the rate.
    mode, attempts = ("adaptive", 8) if patient else ("standard", 4)
    config = botocore.config.Config(
        retries={"mode": mode, "total_max_attempts": attempts},
        connect_timeout=CONNECT_S,
        read_timeout=READ_S,
        user_agent_extra="cloudtrain",
    )
    try:
        core = botocore.session.get_session()
        if not _loaders:
            _loaders.append(core.get_component("data_loader"))
        core.register_component("data_loader", _loaders[0])
        session = boto3.Session(botocore_session=core, profile_name=access.profile, region_name=access.region)
        return session.client(service, endpoint_url=dict(access.endpoints).get(service), config=config)
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise _translated(error, f"reach {service}") from error


def _sdk() -> tuple[Any, Any]:
    """Return boto3 and botocore. Raises ConfigError without them."""
    try:
        import boto3
        import botocore.config
        import botocore.exceptions
        import botocore.parsers
        import botocore.session
    except ImportError as error:
        raise ConfigError(f"the AWS SDK is not installed here: {error}", hint=install("sagemaker")) from error
    return boto3, botocore


@contextlib.contextmanager
def answers(doing: str) -> Iterator[None]:
    """Raise an AWS error of `doing` as one of our errors, in one sentence with a hint."""
    exceptions, parsers = _sdk()[1].exceptions, _sdk()[1].parsers
    try:
        yield
    except (exceptions.BotoCoreError, exceptions.ClientError, parsers.ResponseParserError) as error:
        raise _translated(error, doing) from error


@contextlib.contextmanager
def polls(doing: str) -> Iterator[None]:
    """As `answers`, but raise every error as UnreachableError, because a failed poll tells nothing about the job."""
    try:
        with answers(doing):
            yield
    except UnreachableError:
        raise
    except CloudtrainError as error:
        renew()  # the user or a tool may have renewed the credentials
        raise UnreachableError(error.message, where=error.where, hint=error.hint) from error


def code_of(error: Exception) -> str:
    """Return AWS's code for the error, or "" for an error of any other source."""
    return str(_said(error).get("Code", ""))


def is_refusal(error: Exception) -> bool:
    """Return whether AWS has refused the first and only call: then AWS has done nothing."""
    retries = (getattr(error, "response", None) or {}).get("ResponseMetadata", {}).get("RetryAttempts", 0)
    return bool(code_of(error)) and code_of(error) not in _BUSY and not retries


def is_expired(error: Exception) -> bool:
    """Return whether the credentials have expired; new credentials fix the error."""
    return code_of(error) in _EXPIRED


def _translated(error: Exception, doing: str) -> CloudtrainError:
    code, words = code_of(error), _words(error)
    if code in _EXPIRED or type(error).__name__ in ("TokenRetrievalError", "SSOTokenLoadError", "LoginRefreshRequired"):
        return CredentialError(f"cannot {doing}: the AWS credentials have expired", hint="aws sso login, or renew them")
    if "UnauthorizedSSOToken" in type(error).__name__:
        return CredentialError(f"cannot {doing}: the AWS sign-in has expired", hint="aws sso login")
    if code in _UNKNOWN_KEY:
        return CredentialError(f"cannot {doing}: AWS does not know these credentials ({words})", hint="aws configure")
    if code in _DENIED:
        return CredentialError(f"cannot {doing}: not allowed: {words}", hint="ask for that permission, or another role")
    if code in _NO_CAPACITY:
        hint = "ask for more at Service Quotas (service sagemaker), or take fewer or other instances"
        return CapacityError(f"cannot {doing}: {words}", hint=hint)
    if code in _BUSY or code.startswith("5"):
        return UnreachableError(f"cannot {doing}: AWS gave an unexpected answer: {words}")
    if code:
        return ConfigError(f"cannot {doing}: {words}", where=code)
    return _of_the_client(error, doing, words)


def _of_the_client(error: Exception, doing: str, words: str) -> CloudtrainError:
    """Return our error for a client error, without an answer of AWS."""
    found = _sdk()[1].exceptions
    if isinstance(error, found.ProfileNotFound):
        return CredentialError(f"cannot {doing}: {words}", hint="aws configure list-profiles shows those there are")
    if isinstance(error, (found.NoCredentialsError, found.PartialCredentialsError, found.CredentialRetrievalError)):
        hint = "aws configure, aws sso login, or export AWS_PROFILE: see docs/tutorials/sagemaker.md"
        return CredentialError(f"cannot {doing}: no AWS credentials: {words}", hint=hint)
    if isinstance(error, (found.ConnectionError, found.HTTPClientError, _sdk()[1].parsers.ResponseParserError)):
        return UnreachableError(f"cannot {doing}: AWS does not answer: {words}")
    return ConfigError(f"cannot {doing}: {words}")


def _words(error: Exception) -> str:
    return " ".join(str(_said(error).get("Message") or error).split())


def _said(error: Exception) -> dict[str, Any]:
    found: dict[str, Any] = (getattr(error, "response", None) or {}).get("Error", {})  # of a lost connection it is None
    return found
