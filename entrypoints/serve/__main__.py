"""The server's process: listens, verifies and loads the model, answers until SIGTERM, and finishes what is under way.

The folder is the argument, else the platform's: AIP_STORAGE_URI (Vertex AI), AZUREML_MODEL_DIR, /opt/ml/model
(SageMaker). Vertex AI's variables AIP_HTTP_PORT, AIP_HEALTH_ROUTE and AIP_PREDICT_ROUTE are followed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

from cloudtrain.entrypoints.models.folder import SUMS, ModelFolderError
from cloudtrain.entrypoints.serve.engine import open_engine
from cloudtrain.entrypoints.serve.routes import Routes
from cloudtrain.entrypoints.serve.server import Limits, Server
from cloudtrain.entrypoints.stores.store import open_store

__all__ = ["main"]

_SAGEMAKER_FOLDER = "/opt/ml/model"
_PORT = 8080  # SageMaker's, and Vertex AI's default


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code: 1 if the model was refused or a request was cut off."""
    options = _options(argv)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    health, predict = os.environ.get("AIP_HEALTH_ROUTE", "/ping"), os.environ.get("AIP_PREDICT_ROUTE", "/invocations")
    routes = Routes(health, predict)
    limits = Limits(body_bytes=options.max_body, concurrency=options.max_concurrency)
    try:
        server = Server(routes, options.host, options.port, limits)
    except OSError as error:
        return _refused(f"{options.host}:{options.port} cannot be listened on: {error.strerror}")
    loader = threading.Thread(target=_load, args=(routes, options, server.port, ended), daemon=True)
    loader.start()
    ended.wait()
    unfinished = server.drain()
    if unfinished:
        _say(f"{unfinished} requests were cut off")
    return int(unfinished > 0 or routes.engine is None)


def _load(routes: Routes, options: argparse.Namespace, port: int, ended: threading.Event) -> None:
    """Make the routes ready, or end the server."""
    try:
        engine = open_engine(_folder(options.folder), options.batch, options.threads)
        routes.engine = engine
        _say(f"ready: {engine.name} ({engine.form}, {engine.version}) on http://{options.host}:{port}")
    except ModelFolderError as error:
        _refused(str(error))
        ended.set()
    except Exception as error:  # of the task's code, of torch, of a store
        _refused(f"the model cannot be loaded: {type(error).__name__}: {error}")
        ended.set()


def _folder(given: str | None) -> Path:
    """Return the model folder. Raises ModelFolderError, OSError, StoreError."""
    if given is not None:
        return _inner(Path(given).absolute())
    if uri := os.environ.get("AIP_STORAGE_URI"):
        store, target = open_store(uri), Path(tempfile.mkdtemp(prefix="model-"))
        for name in store.names(""):
            store.get(name, target / name)
        return target
    return _inner(Path(os.environ.get("AZUREML_MODEL_DIR", _SAGEMAKER_FOLDER)))


def _inner(path: Path) -> Path:
    """Return the folder itself, or the single folder inside: Azure ML mounts a model below its registered name."""
    found = [each.parent for each in path.glob(f"*/{SUMS}")]
    return found[0] if not (path / SUMS).exists() and len(found) == 1 else path


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="serve")
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--host", default="127.0.0.1" if "AIP_HTTP_PORT" not in os.environ else "0.0.0.0")
    parser.add_argument("--port", type=int, default=int(os.environ.get("AIP_HTTP_PORT", _PORT)))
    parser.add_argument("--max-body", type=int, default=Limits.body_bytes, help="bytes")
    parser.add_argument("--max-concurrency", type=int, default=Limits.concurrency)
    parser.add_argument("--batch", type=int, default=32, help="samples of a call of the model")
    parser.add_argument("--threads", type=int, default=None, help="of torch")
    return parser.parse_args(argv)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _refused(text: str) -> int:
    _say(f"error: {text}")
    return 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads of cut-off requests would hold the exit
