"""`cloudtrain serve`: answers HTTP requests with an exported model."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from ..errors import UsageError
from .options import PATH, WholeNumber, cli_command, count_option


@cli_command(
    "serve", "cloudtrain serve digits-model", "curl -d '{\"instances\": [...]}' http://127.0.0.1:8080/invocations"
)
@click.argument("folder", type=PATH)
@click.option("--port", type=WholeNumber(0, 65535), default=8080, show_default=True, help="0: any free port.")
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0 answers other machines too.")
@count_option("--max-body", default=8_000_000, show_default=True, help="Bytes of a request.")
@count_option("--max-concurrency", default=32, show_default=True, help="More requests get a 503.")
@count_option("--batch", default=32, show_default=True, help="Samples of one call of the model.")
@count_option("--threads", help="Threads of torch.  [default: torch's]")
def command(
    folder: Path, port: int, host: str, max_body: int, max_concurrency: int, batch: int, threads: int | None
) -> None:
    """Serve a model folder over HTTP until Ctrl-C or SIGTERM.

    The server speaks the contracts of SageMaker, Vertex AI and Azure ML for containers, and the Open Inference Protocol
    (docs/afterwards.md). The checksums are verified before the server is ready. There is no authentication and no TLS:
    keep the address 127.0.0.1, or put a proxy in front.
    """
    from cloudtrain.entrypoints.host.models import CURRENT
    from cloudtrain.entrypoints.models.folder import SUMS

    from ..models.exporting import require_torch
    from ..store.home import home
    from ..text.extras import install

    if not (folder / SUMS).exists():
        if (folder / CURRENT / SUMS).exists():
            hint = f"cloudtrain serve {folder / CURRENT}"
            raise UsageError(f"{folder} is a place of pushed models", hint=f"the current one is served by {hint}")
        raise UsageError(f"{folder} is no model folder", hint="cloudtrain export JOB -o DIR writes a model folder")
    require_torch("the server")
    for name in ("starlette", "uvicorn"):
        if find_spec(name) is None:
            raise UsageError(f"`{name}` is not installed", hint=install("server"))
    options = {"host": host, "port": port, "max-body": max_body, "max-concurrency": max_concurrency, "batch": batch}
    options |= {} if threads is None else {"threads": threads}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    place = home()
    place.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    absolute = str(folder.absolute())
    os.chdir(place)  # `-m` searches the current folder first, and the user's folder may hold a signal.py
    os.execv(sys.executable, [sys.executable, "-m", "cloudtrain.entrypoints.serve", absolute, *words])
