"""The creation of a job by Google's own client. Imported only on use.

The client takes half a second and more of processor time to import. Its calls have neither a time limit nor retries by
default. A retry of a job's creation could make a second job, so jobs.py searches for the job first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from cloudtrain.entrypoints.format import one_line
from cloudtrain.launcher.errors import ConfigError

from . import api
from .api import GoogleError, VertexAccess

CREATE_S = 60.0


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
        raise ConfigError(f"Google's client knows no such job: {one_line(error)}", hint=hint) from error
    url = access.url("aiplatform")
    is_plain = url.startswith("http://")
    options = {"api_endpoint": url if is_plain else urlsplit(url).netloc}
    transport = "rest" if is_plain else None  # REST for an address without TLS, because gRPC would need TLS
    with _errors(exceptions):
        credentials = access.google.login(access.project).credentials()
        client = JobServiceClient(credentials=credentials, client_options=options, transport=transport)
        with client:
            begins()
            made = client.create_custom_job(
                parent=access.parent, custom_job=CustomJob.wrap(message), timeout=CREATE_S, retry=None
            )
    return {"name": made.name, "state": made.state.name}


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
        words = str(error.message)  # of a REST error, with address and JSON around Google's message
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            words = str(error.response.json()["error"]["message"]) or words
        raise GoogleError(status, code, one_line(words)) from error
    except refused.RefreshError as error:
        raise api.no_token(error) from error
    except ParseError as error:
        raise GoogleError(0, "page", f"the answer is not from a Google service: {one_line(error)}") from error
    except (refused.GoogleAuthError, RequestException, ConnectionError) as error:
        raise GoogleError(0, "", one_line(error)) from error
