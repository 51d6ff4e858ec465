"""The server's process: listens, verifies and loads the model, answers until SIGTERM, and finishes what is under way.

The folder is the argument, else the platform's: AIP_STORAGE_URI (Vertex AI), AZUREML_MODEL_DIR, /opt/ml/model
(SageMaker). Vertex AI's variables AIP_HTTP_PORT, AIP_HEALTH_ROUTE and AIP_PREDICT_ROUTE are followed.
"""

from __future__ import annotations

import argparse
import gc
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

from .. import processes
from ..foreign import is_inside
from ..models.folder import SUMS, ModelFolderError
from ..stores.store import open_store
from .engine import open_engine
from .routes import Routes
from .server import ModelServer, ServeLimits

_SAGEMAKER_FOLDER = "/opt/ml/model"
_PORT = "8080"  # SageMaker's, and Vertex AI's default
_COLLECTIONS = (50_000, 20, 50)  # with Python's own thresholds a body of 2 million lists takes 2 s, else 0.3
_MOST_THREADS = 4  # for each processor: torch ends without a message at a thread that the machine refuses


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code: 1 if the model was refused or a request was cut off."""
    options = _options(argv)
    gc.set_threshold(*_COLLECTIONS)
    health, predict = os.environ.get("AIP_HEALTH_ROUTE", "/ping"), os.environ.get("AIP_PREDICT_ROUTE", "/invocations")
    routes = Routes(health, predict)
    limits = ServeLimits(body_bytes=options.max_body, concurrency=options.max_concurrency)
    try:
        server = ModelServer(routes, options.host, options.port, limits)
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]  # Python adds the address
        return _refused(f"{_address(options.host, options.port)} cannot be listened on: {why}")
    # Empty unless the model comes from a store. The name is chosen here, so that it can be removed at any time.
    scratch = Path(tempfile.gettempdir()) / f"model-{os.getpid()}-{secrets.token_hex(4)}"
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    threading.Thread(target=_load, args=(routes, options, server, scratch), daemon=True).start()
    server.run()
    shutil.rmtree(scratch, ignore_errors=True)
    if server.unfinished:
        _say(f"{server.unfinished} requests were cut off")
    return int(server.unfinished > 0 or routes.engine is None)


def _load(routes: Routes, options: argparse.Namespace, server: ModelServer, scratch: Path) -> None:
    """Make the routes ready, or end the server."""
    try:
        engine = open_engine(_folder(options.folder, scratch), options.batch, options.threads)
        routes.engine = engine
        _say(f"ready: {engine.name} ({engine.form}, {engine.version}) on http://{_address(options.host, server.port)}")
    except Exception as error:  # also of the task's code, of torch, of a store
        told = f"the model cannot be loaded: {type(error).__name__}: {error}"
        _refused(str(error) if isinstance(error, ModelFolderError) else told)
        server.should_exit = True


def _folder(given: str | None, scratch: Path) -> Path:
    """Return the model folder; a store's model is copied to `scratch`. Raises ModelFolderError, OSError, StoreError."""
    if given is not None:
        return _inner(Path(given).absolute())
    if uri := os.environ.get("AIP_STORAGE_URI"):
        store = open_store(uri)
        scratch.mkdir(0o700)
        for name in store.names(""):
            if not is_inside(name):  # before the copy: a bucket's names may be any text
                raise ModelFolderError(f"{uri} names a file outside the folder: {name!r}")
            store.get(name, scratch / name)
        return scratch
    return _inner(Path(os.environ.get("AZUREML_MODEL_DIR", _SAGEMAKER_FOLDER)))


def _inner(path: Path) -> Path:
    """Return the folder itself, or the single folder inside: Azure ML mounts a model below its registered name."""
    found = [each.parent for each in path.glob(f"*/{SUMS}")]
    return found[0] if not (path / SUMS).exists() and len(found) == 1 else path


def _options(argv: list[str]) -> argparse.Namespace:
    most = _MOST_THREADS * processes.cores()
    port = partial(_whole, 0, 65_535, "port (0 to 65535); AIP_HTTP_PORT gives the default")
    threads = partial(_whole, 1, most, f"number from 1 to {most}, {_MOST_THREADS} for each processor")
    parser = argparse.ArgumentParser(prog="serve")
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--host", default="127.0.0.1" if "AIP_HTTP_PORT" not in os.environ else "0.0.0.0")
    parser.add_argument("--port", type=port, default=os.environ.get("AIP_HTTP_PORT", _PORT))
    parser.add_argument("--max-body", type=int, default=ServeLimits.body_bytes, help="bytes")
    parser.add_argument("--max-concurrency", type=int, default=ServeLimits.concurrency)
    parser.add_argument("--batch", type=int, default=32, help="samples of a call of the model")
    parser.add_argument("--threads", type=threads, default=None, help="of torch")
    return parser.parse_args(argv)


def _whole(least: int, most: int, what: str, text: str) -> int:
    """Return the whole number. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"`{text}` is no {what}")
    return int(text)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _refused(text: str) -> int:
    _say(f"error: {text}")
    return 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads of cut-off requests would hold the exit
