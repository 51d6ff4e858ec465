"""Calls by Google's own clients: create a job, upload its code. Imported only on use.

Each client takes half a second and more of processor time to import. The clients' calls have neither a time limit nor
retries by default. A retry of a job's creation could make a second job, so jobs.py searches for the job first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cloudtrain.backends.vertex import api
from cloudtrain.backends.vertex.api import GoogleError, VertexAccess
from cloudtrain.launcher.errors import ConfigError
from cloudtrain.launcher.text.remote import one_line

__all__ = ["create", "put"]

CREATE_S, UPLOAD_S = 60.0, 300.0


def create(access: VertexAccess, body: dict[str, Any], begins: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Send the job once; return its resource name and state. Raises GoogleError, ConfigError.

    `begins` is called directly before the request.
    """
    try:
        from google.api_core import exceptions
        from google.cloud.aiplatform_v1.services.job_service import JobServiceClient
        from google.cloud.aiplatform_v1.types import CustomJob
        from google.protobuf import json_format
    except ImportError as error:
        raise api.not_installed(error) from error
    try:
        message = json_format.ParseDict(body, CustomJob.pb(CustomJob()))
    except json_format.ParseError as error:
        hint = "fix vertex.raw, or update google-cloud-aiplatform if the field is a new one"
        raise ConfigError(f"Google's client knows no such job: {one_line(str(error))}", hint=hint) from error
    options, transport = _target(access, "aiplatform")
    with _errors(exceptions):
        client = JobServiceClient(credentials=api.credentials(access), client_options=options, transport=transport)
        with client:
            begins()
            made = client.create_custom_job(
                parent=access.parent, custom_job=CustomJob.wrap(message), timeout=CREATE_S, retry=None
            )
    return {"name": made.name, "state": made.state.name}


def put(access: VertexAccess, path: Path, uri: str) -> None:
    """Upload the file unless an object of that name exists. Raises GoogleError."""
    try:
        from google.api_core import exceptions
        from google.cloud.storage import Client
    except ImportError as error:
        raise api.not_installed(error) from error
    bucket, name = api.split_uri(uri)
    options, _ = _target(access, "storage")
    with _errors(exceptions):
        client = Client(project=access.project, credentials=api.credentials(access), client_options=options)
        try:
            client.bucket(bucket).blob(name).upload_from_filename(
                str(path), content_type="application/octet-stream", if_generation_match=0, timeout=UPLOAD_S
            )
        except exceptions.PreconditionFailed:
            return
        finally:
            client.close()


def _target(access: VertexAccess, service: str) -> tuple[dict[str, str], str | None]:
    """Return the client's options and its transport: REST for an address without TLS, because gRPC would need TLS."""
    url = access.url(service)
    if service == "storage":
        return {"api_endpoint": url}, None
    if url.startswith("http://"):
        return {"api_endpoint": url}, "rest"
    return {"api_endpoint": urlsplit(url).netloc}, None


@contextlib.contextmanager
def _errors(exceptions: Any) -> Iterator[None]:
    """Raise all kinds of the clients' errors as GoogleError."""
    from google.auth import exceptions as refused
    from google.protobuf.json_format import ParseError
    from requests.exceptions import RequestException

    try:
        yield
    except exceptions.GoogleAPICallError as error:
        status = int(error.code or 0)
        code = error.grpc_status_code.name if getattr(error, "grpc_status_code", None) else ""
        raise GoogleError(status, code, one_line(_message(error) or str(error.message))) from error
    except exceptions.RetryError as error:
        raise GoogleError(0, "", one_line(str(error))) from error
    except refused.RefreshError as error:
        raise api.no_token(error) from error
    except ParseError as error:
        raise GoogleError(0, "page", f"the answer is not from a Google service: {one_line(str(error))}") from error
    except (refused.GoogleAuthError, RequestException, ConnectionError) as error:
        raise GoogleError(0, "", one_line(str(error))) from error


def _message(error: Any) -> str:
    """Return Google's message of a REST error: the clients put address and JSON around the message."""
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        return str(error.response.json()["error"]["message"])
    return ""
