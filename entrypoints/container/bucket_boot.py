# Fetches a job's code from its bucket and becomes container.py: python3 -u -c THIS CODE_URI ORDER_URI FENCE [ENDPOINT]
# The job's arguments carry this text, so it is short and self-contained. At exit code 1 Vertex AI ends the job,
# at 143 the job may start again: only the network has failed.
import hashlib
import io
import json
import os
import signal
import ssl
import sys
import tarfile
import tempfile
import time
from http import client
from pathlib import Path
from urllib import error, parse, request

PATIENCE_S = float(os.environ.get("CLOUDTRAIN_BOOT_PATIENCE_S", "300"))  # a new machine may have no network yet


def end(words: str, code: int = 1) -> None:
    """Print the reason, and end."""
    print(f"cloudtrain: {words}", flush=True)
    os._exit(code)


def token() -> str:
    """Return a token of the job's service account, requested without a proxy."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    about = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    asked = request.Request(about, headers={"Metadata-Flavor": "Google"})
    try:
        with request.build_opener(request.ProxyHandler({})).open(asked, timeout=10) as answer:
            return str(json.load(answer)["access_token"])
    except error.HTTPError as failure:  # at a machine's start; not the bucket's answer
        raise OSError(f"the metadata server answers {failure}") from None


def fetch(uri: str, endpoint: str) -> bytes:
    """Return the object's bytes; end if they cannot be read."""
    bucket, _, name = uri[5:].partition("/")
    url = f"{endpoint.rstrip('/')}/storage/v1/b/{bucket}/o/{parse.quote(name, safe='')}?alt=media"
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            asked = request.Request(url, headers={"Authorization": f"Bearer {token()}"})
            with request.urlopen(asked, timeout=60) as answer:
                return bytes(answer.read())
        except (OSError, ValueError, KeyError, client.HTTPException) as failure:
            fault, status = failure, getattr(failure, "code", None)
            if isinstance(getattr(failure, "reason", None), ssl.SSLCertVerificationError):
                end(f"add ca-certificates to the image: {endpoint} is not trusted: {failure}")
        if status == 403:
            end(f"the job's service account needs storage.objects.get for {uri}: {fault}")
        if status == 404:
            end(f"{uri} no longer exists: submit the job again: {fault}")
        if time.monotonic() > until:
            end(f"cannot read {uri} for {PATIENCE_S:.0f} s: check the network route to {endpoint}: {fault!r}", 143)
        time.sleep(min(5.0, PATIENCE_S / 50))


def leave(words: str, order: str, endpoint: str) -> None:
    """Leave the exit report beside the order."""
    bucket, _, name = order[5:].partition("/")
    name = parse.quote(name.replace("order.json", "ended-0.json"), safe="")
    url = f"{endpoint.rstrip('/')}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}"
    report = {"state": "failed", "reason": "error", "kind": "config", "message": words}
    head = {"Authorization": f"Bearer {token()}"}
    request.urlopen(request.Request(url, json.dumps(report).encode(), head), timeout=60)


def main(argv: "list[str]") -> None:
    """Fetch and unpack the code, then become container.py."""
    # The first process of a container has no default for signals.
    signal.signal(signal.SIGTERM, lambda *_: end("stopped before the start", 143))
    code, order, fence, endpoint = [*argv, "https://storage.googleapis.com"][:4]
    if sys.version_info < (3, 10):  # noqa: UP036 - any image may be told to run this
        words = f"use an image with Python 3.10 or newer: this image has {sys.version.split()[0]}"
        try:
            leave(words, order, endpoint)
        finally:
            end(words)
    data = fetch(code, endpoint)
    if hashlib.sha256(data).hexdigest() not in code:
        end(f"submit the job again: {code} is not the code that was sent")
    root = Path(tempfile.gettempdir(), "cloudtrain")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            if member.isreg() and member.name.startswith("runtime/") and ".." not in member.name:
                (root / member.name).parent.mkdir(parents=True, exist_ok=True)
                (root / member.name).write_bytes(tar.extractfile(member).read())  # type: ignore[union-attr]
    (root / "bundle.tar.gz").write_bytes(data)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [f"{root}/runtime", os.environ.get("PYTHONPATH")]))
    if len(argv) > 3:
        os.environ["CLOUDTRAIN_STORAGE_ENDPOINT"] = endpoint
    command = [sys.executable, "-u", "-m", "cloudtrain.entrypoints.container", str(root), order, f"fence={fence}"]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main(sys.argv[1:])
