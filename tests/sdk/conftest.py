"""A server for AWS's own SDK: S3, IAM and SageMaker at one address, with a positive answer to every call."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, quote

import pytest

ROLE = "arn:aws:iam::123456789012:role/cloudtrain"
JOB = "arn:aws:sagemaker:us-west-2:123456789012:training-job/digits"
TRUST = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
DESCRIBED = {
    "TrainingJobName": "digits",
    "TrainingJobArn": JOB,
    "TrainingJobStatus": "InProgress",
    "SecondaryStatus": "Starting",
    "ModelArtifacts": {"S3ModelArtifacts": "s3://my-bucket/model.tar.gz"},
    "AlgorithmSpecification": {"TrainingInputMode": "File"},
    "ResourceConfig": {"VolumeSizeInGB": 30},
    "StoppingCondition": {},
    "CreationTime": 1.0,
}
BUCKETS = "<Buckets><Bucket><Name>my-bucket</Name><CreationDate>2026-01-01T00:00:00Z</CreationDate></Bucket></Buckets>"


@dataclass(frozen=True)
class Aws:
    """The server's address, the names of its calls, and the bodies of CreateTrainingJob."""

    url: str
    calls: list[str] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="session")
def aws() -> Iterator[Aws]:
    """Run the server on this machine."""

    class Endpoint(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # with HTTP/1.0 botocore waits a second before each upload

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            target, form = self.headers["X-Amz-Target"], dict(parse_qsl(body.decode())) if self.path == "/" else {}
            if target:
                self._answer(target, _sagemaker(target, body))
            elif "Action" in form:
                self._answer(form["Action"], _iam(form))
            elif self.path == "/":
                self._answer("ListBuckets", f"<ListAllMyBucketsResult>{BUCKETS}</ListAllMyBucketsResult>")
            else:
                self._answer(f"{self.command} object", "")

        do_PUT = do_POST = do_HEAD = do_GET

        def _answer(self, call: str, text: str) -> None:
            found.calls.append(call)
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Log no requests."""

    def _sagemaker(target: str, body: bytes) -> str:
        if target != "SageMaker.CreateTrainingJob":
            return json.dumps(DESCRIBED)
        found.created.append(json.loads(body))
        return json.dumps({"TrainingJobArn": JOB})

    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        found = Aws(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield found
        server.shutdown()
        thread.join()


def _iam(form: dict[str, str]) -> str:
    """Return a role that SageMaker may assume, and a policy decision that allows every action."""
    action = form["Action"]
    if action == "GetRole":
        policy = quote(json.dumps({"Statement": [TRUST]}))
        said = f"<Role><Arn>{ROLE}</Arn><AssumeRolePolicyDocument>{policy}</AssumeRolePolicyDocument></Role>"
    else:
        asked = [value for key, value in form.items() if key.startswith("ActionNames.member.")]
        decided = (f"<EvalActionName>{name}</EvalActionName><EvalDecision>allowed</EvalDecision>" for name in asked)
        said = f"<EvaluationResults>{''.join(f'<member>{each}</member>' for each in decided)}</EvaluationResults>"
    return f"<{action}Response><{action}Result>{said}</{action}Result></{action}Response>"
