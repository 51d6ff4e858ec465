"""AWS's clients, and AWS's errors as cloudtrain's errors. The SDK is imported inside functions, on first use."""

from __future__ import annotations

import gc
import math
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.launcher.errors import CapacityError, ConfigError, CredentialError, UnreachableError
from cloudtrain.launcher.text.extras import install

from .. import edge
from ..edge import RemoteFault
from ..http import CONNECTIONS
from .records import SageMakerRef, SageMakerSending

CONNECT_S, READ_S = 10, 60
RENEW_S = 5.0

# New credentials fix these errors.
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
_UNKNOWN_KEY = ("InvalidClientTokenId", "UnrecognizedClientException", "InvalidAccessKeyId", "SignatureDoesNotMatch")
_DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403", "AllAccessDisabled")
_NO_CAPACITY = ("ResourceLimitExceeded", "LimitExceededException", "InsufficientCapacity", "CapacityError")
_BUSY = (
    *("Throttling", "ThrottlingException", "ThrottledException", "RequestLimitExceeded", "TooManyRequestsException"),
    *("SlowDown", "RequestTimeout", "InternalFailure", "InternalServerError", "InternalError"),
    *("ServiceUnavailable", "ServiceUnavailableException", "500", "502", "503", "504"),
)


@dataclass(frozen=True)
class AwsAccess:
    """How to reach an account: the region, the profile of AWS's own config, addresses of services (service, url)."""

    region: str
    profile: str | None
    endpoints: tuple[tuple[str, str], ...] = ()
    clients: AwsClients = field(default_factory=lambda: AwsClients(), compare=False, repr=False)

    @classmethod
    def of(cls, data: SageMakerRef | SageMakerSending, clients: AwsClients) -> AwsAccess:
        """Return the access for a job's handle or sending plan, with the process's clients."""
        return cls(data.region, data.profile, tuple(sorted(data.endpoints.items())), clients)


class AwsClients:
    """The process's clients of AWS's services, each made once."""

    def __init__(self) -> None:
        self._renewed_s = -math.inf
        self._loader: Any = None  # botocore's loader, shared by all sessions: it caches the services' descriptions
        self._made: dict[tuple[AwsAccess, str, bool], Any] = {}
        self._making = threading.Lock()

    def get(self, access: AwsAccess, service: str, *, patient: bool) -> Any:
        """Return the service's client. Raises as `client`."""
        key = (access, service, patient)
        with self._making:  # the first of several threads makes the client, which takes a second
            if (known := self._made.get(key)) is None:
                known = self._made[key] = self._new(access, service, patient=patient)
        return known

    def renew(self) -> None:
        """Drop all clients, so that new clients read the credentials again; once in RENEW_S: it costs a second."""
        if time.monotonic() - self._renewed_s < RENEW_S:
            return
        self._renewed_s = time.monotonic()
        self._made.clear()
        gc.collect()  # the clients' parts form reference cycles

    def _new(self, access: AwsAccess, service: str, *, patient: bool) -> Any:
        boto3, botocore = _sdk()
        # Adaptive: AWS throttles CreateTrainingJob hard, and many submits must share the rate.
        mode, attempts = ("adaptive", 8) if patient else ("standard", 4)
        config = botocore.config.Config(
            retries={"mode": mode, "total_max_attempts": attempts},
            connect_timeout=CONNECT_S,
            read_timeout=READ_S,
            max_pool_connections=CONNECTIONS,
            user_agent_extra="cloudtrain",
        )
        try:
            core = botocore.session.get_session()
            self._loader = self._loader or core.get_component("data_loader")
            core.register_component("data_loader", self._loader)
            session = boto3.Session(botocore_session=core, profile_name=access.profile, region_name=access.region)
            return session.client(service, endpoint_url=dict(access.endpoints).get(service), config=config)
        except (botocore.exceptions.BotoCoreError, ValueError) as error:
            raise edge.translated(_classified(error), f"reach {service}") from error


def client(access: AwsAccess, service: str, *, patient: bool = False) -> Any:
    """Return the service's client, made once; a `patient` client retries for minutes, for calls that no poll repeats.

    Raises ConfigError without the SDK, CredentialError without the profile.
    """
    return access.clients.get(access, service, patient=patient)


def require_credentials(access: AwsAccess) -> None:
    """Raise ConfigError without the SDK, CredentialError if the SDK finds no credentials; makes no call to AWS."""
    boto3, botocore = _sdk()
    with answers("start the training job"):
        if boto3.Session(profile_name=access.profile).get_credentials() is None:
            raise botocore.exceptions.NoCredentialsError


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


def answers(doing: str) -> AbstractContextManager[None]:
    """Raise an AWS error of `doing` as one of our errors. Raises ConfigError without the SDK."""
    _sdk()
    return edge.answers(doing, _fault)


def polls(access: AwsAccess, doing: str) -> AbstractContextManager[None]:
    """As `answers`, but raise every error as UnreachableError, because a failed poll tells nothing about the job."""
    _sdk()
    return edge.polls(doing, _fault, access.clients.renew)


def code_of(error: Exception) -> str:
    """Return AWS's code for the error, or "" for an error of any other source."""
    return str(_said(error).get("Code", ""))


def is_refusal(error: Exception) -> bool:
    """Return whether AWS has refused the first and only call: then AWS has done nothing."""
    retries = (getattr(error, "response", None) or {}).get("ResponseMetadata", {}).get("RetryAttempts", 0)
    return bool(code_of(error)) and code_of(error) not in _BUSY and not retries


def _fault(error: Exception) -> RemoteFault | None:
    _, botocore = _sdk()
    kinds = (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, botocore.parsers.ResponseParserError)
    return _classified(error) if isinstance(error, kinds) else None


def _classified(error: Exception) -> RemoteFault:
    code, words = code_of(error), " ".join(str(_said(error).get("Message") or error).split())
    if code in EXPIRED or type(error).__name__ in ("TokenRetrievalError", "SSOTokenLoadError", "LoginRefreshRequired"):
        return RemoteFault(CredentialError, "the AWS credentials have expired", "aws sso login, or renew them")
    if "UnauthorizedSSOToken" in type(error).__name__:
        return RemoteFault(CredentialError, "the AWS sign-in has expired", "aws sso login")
    if code in _UNKNOWN_KEY:
        return RemoteFault(CredentialError, f"AWS does not know these credentials ({words})", "aws configure")
    if code in _DENIED:
        return RemoteFault(CredentialError, f"not allowed: {words}", "ask for that permission, or another role")
    if code in _NO_CAPACITY:
        hint = "ask for more at Service Quotas (service sagemaker), or take fewer or other instances"
        return RemoteFault(CapacityError, words, hint)
    if code in _BUSY or code.startswith("5"):
        return RemoteFault(UnreachableError, f"AWS gave an unexpected answer: {words}")
    return RemoteFault(ConfigError, words, where=code) if code else _of_the_client(error, words)


def _of_the_client(error: Exception, words: str) -> RemoteFault:
    """Return the meaning of a client error, without an answer of AWS."""
    _, botocore = _sdk()
    found = botocore.exceptions
    if isinstance(error, found.ProfileNotFound):
        return RemoteFault(CredentialError, words, "aws configure list-profiles shows those there are")
    if isinstance(error, (found.NoCredentialsError, found.PartialCredentialsError, found.CredentialRetrievalError)):
        hint = "aws configure, aws sso login, or export AWS_PROFILE: see docs/tutorials/sagemaker.md"
        return RemoteFault(CredentialError, f"no AWS credentials: {words}", hint)
    if isinstance(error, (found.ConnectionError, found.HTTPClientError, botocore.parsers.ResponseParserError)):
        return RemoteFault(UnreachableError, f"AWS does not answer: {words}")
    return RemoteFault(ConfigError, words)


def _said(error: Exception) -> dict[str, Any]:
    found: dict[str, Any] = (getattr(error, "response", None) or {}).get("Error", {})  # of a lost connection it is None
    return found
