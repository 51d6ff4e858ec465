"""A send with Azure's own SDK, which uploads the code and registers the environment; only this module imports it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cloudtrain.entrypoints.format import one_line
from cloudtrain.launcher.errors import ConfigError

from ..edge import importing
from . import api
from .api import AzureAccess
from .request import BUNDLE

RETRIES = 4


def create(
    access: AzureAccess, job: dict[str, Any], bundle: Path, folder: Path, begins: Callable[[], None]
) -> dict[str, Any]:
    """Upload the code unless Azure has a copy, and start the job; return its services, with Azure's names.

    The current directory is `folder`, the user's code folder, because the SDK notes its commit. `begins` is called
    before each request that may create the job. Raises AzureError, or ConfigError if the SDK itself refuses the job.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="cloudtrain-") as scratch:
            code = Path(scratch, "code")
            code.mkdir()
            shutil.copyfile(bundle, code / BUNDLE)
            with _quiet(), _inside(folder if folder.is_dir() else code):
                return _create(access, {**job, "code": str(code)}, Path(scratch), begins)
    except OSError as error:
        raise ConfigError(f"the code cannot be sent: {error.strerror or error}", where=error.filename or "") from error


def _create(access: AzureAccess, job: dict[str, Any], scratch: Path, begins: Callable[[], None]) -> dict[str, Any]:
    with importing(api.not_installed):
        from azure.ai.ml import MLClient, load_job
        from azure.ai.ml.exceptions import MlException
        from azure.core import exceptions as core
        from marshmallow.exceptions import ValidationError
    from cloudtrain.launcher.planning.render import as_yaml

    seen: list[bool] = []

    def look(request: Any) -> None:
        seen.append(True)
        if request.http_request.method not in ("GET", "HEAD") and "/jobs/" in request.http_request.url:
            begins()

    path, workspace = scratch / "job.yml", access.workspace
    path.write_text(as_yaml(job), encoding="utf-8")
    try:
        client = MLClient(
            access.azure.credential(workspace.cloud),
            workspace.subscription,
            workspace.resource_group,
            workspace.name,
            cloud=workspace.cloud,
            enable_telemetry=False,
            retry_total=RETRIES,
            logging_enable=False,
            raw_request_hook=look,
        )
        sent = client.jobs.create_or_update(load_job(path))
    except core.HttpResponseError as error:
        raise _of_response(error) from error
    except (core.ServiceRequestError, core.ServiceResponseError) as error:
        raise api.AzureError(0, "", one_line(error, 600)) from error
    except core.AzureError as error:
        raise _of_cause(error) from error
    except (MlException, ValidationError) as error:
        if isinstance(error.__cause__ or error.__context__, core.AzureError):
            raise _of_cause(error) from error
        raise ConfigError(f"Azure's SDK refuses the job: {one_line(error, 600)}", key="azureml") from error
    finally:
        if not seen:  # a version of the SDK without hooks: any request may have created the job
            begins()
    return {name: {"endpoint": getattr(each, "endpoint", None)} for name, each in (sent.services or {}).items()}


def _of_response(error: Any) -> api.AzureError:
    code = getattr(getattr(error, "error", None), "code", None) or ""
    message = getattr(getattr(error, "error", None), "message", None) or getattr(error, "message", "")
    if not error.status_code:
        return api.AzureError(0, "", one_line(error, 600))
    return api.AzureError(error.status_code, str(code), one_line(message or error, 600))


def _of_cause(error: BaseException) -> api.AzureError:
    """Return the HTTP answer behind the SDK's own error."""
    inner: BaseException | None = error
    while inner is not None:
        if getattr(inner, "status_code", None):
            return _of_response(inner)
        inner = inner.__cause__ or inner.__context__
    return api.AzureError(0, "", one_line(error, 600))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the SDK's progress bars, warnings of experimental classes and log lines off the terminal."""
    logger = logging.getLogger("azure.ai.ml")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(before)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Change the current directory temporarily; contextlib has an equal function from Python 3.11 on."""
    before = os.open(".", os.O_RDONLY)  # a removed folder has no name
    os.chdir(folder)
    try:
        yield
    finally:
        os.fchdir(before)
        os.close(before)
