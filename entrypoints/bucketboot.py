# Brings a job's code from its bucket and becomes container.py: python3 -u -c THIS CODE_URI ORDER_URI FENCE [ENDPOINT]
# The job's arguments carry this text, so it is short and needs nothing of ours. At exit code 1 Vertex AI ends the job,
# at 143 it may begin anew: only the network has failed.
import hashlib
import io
import json
import os
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from urllib import error, parse, request

code, order, fence, endpoint = [*sys.argv[1:], "https://storage.googleapis.com"][:4]
bucket, _, name = code[5:].partition("/")
url = f"{endpoint.rstrip('/')}/storage/v1/b/{bucket}/o/{parse.quote(name, safe='')}?alt=media"
host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
about = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
data, fault = b"", ""
for _try in range(60):  # a machine that has just begun may have no network yet
    try:
        asked = request.Request(about, headers={"Metadata-Flavor": "Google"})
        with request.build_opener(request.ProxyHandler({})).open(asked, timeout=10) as answer:
            token = json.load(answer)["access_token"]
        asked = request.Request(url, headers={"Authorization": f"Bearer {token}"})
        with request.urlopen(asked, timeout=60) as answer:
            data = answer.read()
        break
    except (OSError, ValueError, KeyError) as failure:
        fault = str(failure)
        if isinstance(failure, error.HTTPError) and failure.code in (403, 404):
            print(f"cloudtrain: {code}: {fault}; the job's service account needs storage.objects.get there", flush=True)
            sys.exit(1)
        time.sleep(5)
if not data:
    print(f"cloudtrain: {code} cannot be read for minutes now: {fault}", flush=True)
    sys.exit(143)
if hashlib.sha256(data).hexdigest() not in code:
    print(f"cloudtrain: {code} is not the code that was sent: send the job again", flush=True)
    sys.exit(1)
root = Path(tempfile.gettempdir(), "cloudtrain")
with tarfile.open(fileobj=io.BytesIO(data)) as tar:
    for member in tar:
        if member.name.startswith("runtime/") and ".." not in member.name and (file := tar.extractfile(member)):
            (root / member.name).parent.mkdir(parents=True, exist_ok=True)
            (root / member.name).write_bytes(file.read())
(root / "bundle.tar.gz").write_bytes(data)
os.environ["PYTHONPATH"] = f"{root}/runtime"
if len(sys.argv) > 4:
    os.environ["CLOUDTRAIN_STORAGE_ENDPOINT"] = endpoint
command = [sys.executable, "-u", "-m", "cloudtrain.entrypoints.container", str(root), order, f"fence={fence}"]
os.execv(sys.executable, command)
