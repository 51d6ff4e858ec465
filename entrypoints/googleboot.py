"""Starts a replica of a Vertex AI job: brings its order and its code from the bucket, and runs container.py.

    python3 -u -c SOURCE BUNDLE_URI ORDER_URI TOKEN [STORAGE_ENDPOINT]

SOURCE is this text, which the job's arguments carry: it is short, and imports nothing of ours.
Exit codes: 1, at which Vertex AI ends the job; 143, at which it may try again: only the network failed.
"""

import hashlib
import http.client
import io
import json
import os
import random
import signal
import ssl
import sys
import tarfile
import time
from pathlib import Path
from urllib import error, parse, request

_told = os.environ.get
_FOLDER = Path(_told("CLOUDTRAIN_BOOT_DIR", "/tmp/cloudtrain"))
_PATIENCE_S = float(_told("CLOUDTRAIN_BOOT_PATIENCE_S", "300"))


def _leave(words: str, code: int = 1) -> None:
    print(f"cloudtrain: {words}", flush=True)
    sys.exit(code)


def _token() -> str:
    host = _told("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    asked = request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with request.build_opener(request.ProxyHandler({})).open(asked, timeout=10) as answer:
            return str(json.load(answer)["access_token"])
    except Exception as fault:  # it may not be up yet
        raise ConnectionError(f"no token from {host}: {fault}") from fault


def _fetch(uri: str, endpoint: str, absent: str) -> bytes:
    bucket, _, key = uri[5:].partition("/")
    url = f"{endpoint}/storage/v1/b/{bucket}/o/{parse.quote(key, safe='')}?alt=media"
    end_s, pause_s = time.monotonic() + _PATIENCE_S, 0.5
    while True:
        try:
            asked = request.Request(url, headers={"Authorization": f"Bearer {_token()}"})
            with request.urlopen(asked, timeout=60) as answer:
                return bytes(answer.read())
        except error.HTTPError as fault:
            words = f"HTTP {fault.code}: {' '.join(fault.read(400).decode(errors='replace').split())}"
            if 400 <= fault.code < 500 and fault.code not in (408, 429):
                denied = f"the job's service account needs storage.objects.get for {uri}"
                _leave(f"{absent if fault.code == 404 else denied} ({words})")
        except (OSError, http.client.HTTPException) as fault:
            words = str(fault)
            if isinstance(getattr(fault, "reason", 0), ssl.SSLCertVerificationError):
                _leave(f"add ca-certificates to the image: {endpoint} is not trusted ({words})")
        if time.monotonic() > end_s:
            _leave(f"{uri} cannot be read for {_PATIENCE_S:.0f} s now: is there a way to {endpoint}? ({words})", 143)
        time.sleep(pause_s * random.uniform(0.5, 1))
        pause_s = min(2 * pause_s, 20)


def _main(bundle_uri: str, order_uri: str, token: str, given: str = "") -> None:
    # As process 1 it would not even notice a signal without a handler.
    signal.signal(signal.SIGTERM, lambda *_: _leave("stopped before the start", 143))
    if sys.hexversion < 0x30A0000:
        _leave(f"take an image with Python 3.10 or newer: this one has {sys.version}")
    endpoint = (given or _told("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com").rstrip("/")
    endpoint = endpoint if "://" in endpoint else f"http://{endpoint}"
    text = _fetch(order_uri, endpoint, "the order was taken back: this job is not to run")
    order = json.loads(text)
    if order.get("fence", order.get("token")) != token:
        _leave("another send of this job took its place: this one is not to run")
    bundle = _fetch(bundle_uri, endpoint, f"send the job again: its code is not at {bundle_uri} any more")
    if hashlib.sha256(bundle).hexdigest() != order["bundle_sha256"]:
        _leave(f"send the job again: {bundle_uri} is not the code that was sent")
    _FOLDER.mkdir(parents=True, exist_ok=True)
    (_FOLDER / "order.json").write_bytes(text)
    (_FOLDER / "bundle.tar.gz").write_bytes(bundle)
    with tarfile.open(fileobj=io.BytesIO(bundle)) as tar:
        for member in tar:
            parts = member.name.split("/")
            if parts[0] == "runtime" and ".." not in parts and member.isreg() and (data := tar.extractfile(member)):
                path = _FOLDER.joinpath(*parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data.read())
    paths = filter(None, [f"{_FOLDER}/runtime", _told("PYTHONPATH")])
    env = {**os.environ, "PYTHONPATH": ":".join(paths)}
    if given:
        env["CLOUDTRAIN_STORAGE_ENDPOINT"] = given
    command = [sys.executable, "-u", "-m", "cloudtrain.entrypoints.container", str(_FOLDER), "order.json"]
    os.execve(sys.executable, command, env)


if __name__ == "__main__":
    _main(*sys.argv[1:])
