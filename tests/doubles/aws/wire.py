"""An HTTP request to AWS parsed into a call of an operation, and answers in the protocol of the call."""

import io
import json
import re
import socket
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
Reply = Iterable[bytes]

CONTAINER_KEY = "ASIACONTAINERROLE000"  # the access key of the role inside containers
_TARGETS = {
    "SageMaker": "sagemaker",
    "Logs": "logs",
    "ServiceQuotasV": "service-quotas",
    "AmazonSSM": "ssm",
    "AWSPriceListService": "pricing",
}
_CREDENTIAL = re.compile(r"Credential=([^/,\s]+)/\d+/([^/]+)/([^/]+)/aws4_request")


class AwsError(Exception):
    """An error as the answer of an operation."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.status = code, message, status


@dataclass(frozen=True)
class Call:
    """A requested operation."""

    service: str
    operation: str
    params: Any
    region: str
    access_key: str
    protocol: str  # json, query or s3

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names for faults."""
        return self.operation, f"{self.service}:{self.operation}"

    @property
    def is_from_container(self) -> bool:
        """Return whether the caller is inside a container."""
        return self.access_key == CONTAINER_KEY


def parse(environ: Environ) -> Call:
    """Return the call of the request; the request's body stays readable."""
    found = _CREDENTIAL.search(environ.get("HTTP_AUTHORIZATION", ""))
    access_key, region, service = (found[1], found[2], found[3]) if found else ("", "us-east-1", "s3")
    prefix, _, operation = environ.get("HTTP_X_AMZ_TARGET", "").partition(".")
    if operation:
        name = prefix.split("_")[0].rstrip("0123456789")
        service = _TARGETS.get(name, service)
        body = _body(environ)
        try:
            params = json.loads(body or b"{}")
        except ValueError:
            params = body.decode(errors="replace")
        return Call(service, operation, params, region, access_key, "json")
    if service != "s3":
        fields = dict(parse_qsl(_body(environ).decode(errors="replace")))
        return Call(service, fields.pop("Action", ""), fields, region, access_key, "query")
    return Call("s3", *_s3(environ), region, access_key, "s3")


def reply(start: StartResponse, body: dict[str, Any], status: str = "200 OK", code: str | None = None) -> Reply:
    """Answer in JSON 1.1."""
    data = json.dumps(body).encode()
    headers = [("Content-Type", "application/x-amz-json-1.1"), ("Content-Length", str(len(data)))]
    headers.append(("x-amzn-RequestId", str(uuid.uuid4())))
    if code:
        headers.append(("x-amzn-ErrorType", code))
    start(status, headers)
    return [data]


def reply_error(start: StartResponse, call: Call, error: AwsError) -> Reply:
    """Answer an error in the protocol of the call."""
    status = f"{error.status} Error"
    if call.protocol == "json":
        return reply(start, {"__type": error.code, "message": error.message}, status, error.code)
    inner = f"<Code>{escape(error.code)}</Code><Message>{escape(error.message)}</Message>"
    if call.protocol == "query":
        inner = f"<ErrorResponse><Error><Type>Sender</Type>{inner}</Error></ErrorResponse>"
    else:
        inner = f"<Error>{inner}</Error>"
    data = f'<?xml version="1.0" encoding="UTF-8"?>{inner}'.encode()
    start(status, [("Content-Type", "text/xml"), ("Content-Length", str(len(data)))])
    return [] if call.operation.startswith("Head") else [data]


def hang_up(environ: Environ) -> None:
    """Close the connection without an answer. Raises ConnectionError, which the server treats as a lost client."""
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError("hung up on purpose")


def _body(environ: Environ) -> bytes:
    body: bytes = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    return body


def _s3(environ: Environ) -> tuple[str, dict[str, Any]]:
    """Return the operation and its bucket, key and query."""
    method: str = environ["REQUEST_METHOD"]
    query = dict(parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True))
    bucket, _, key = environ.get("PATH_INFO", "/").lstrip("/").partition("/")
    params = {"Bucket": bucket, **({"Key": key} if key else {}), **query}
    if not bucket:
        return "ListBuckets", params
    if key:
        return _s3_object(method, query, "HTTP_X_AMZ_COPY_SOURCE" in environ), params
    if method == "GET":
        if "list-type" in query:
            return "ListObjectsV2", params
        special = {"location": "GetBucketLocation", "uploads": "ListMultipartUploads", "versions": "ListObjectVersions"}
        return next((name for word, name in special.items() if word in query), "ListObjects"), params
    if method == "POST":
        return "DeleteObjects", params
    names = {"PUT": "CreateBucket", "HEAD": "HeadBucket", "DELETE": "DeleteBucket"}
    return names.get(method, method), params


def _s3_object(method: str, query: dict[str, str], is_copy: bool) -> str:
    if method == "PUT":
        if "partNumber" in query:
            return "UploadPart"
        return "CopyObject" if is_copy else "PutObject"
    if method == "POST":
        return "CompleteMultipartUpload" if "uploadId" in query else "CreateMultipartUpload"
    if method == "DELETE":
        return "AbortMultipartUpload" if "uploadId" in query else "DeleteObject"
    return {"GET": "GetObject", "HEAD": "HeadObject"}.get(method, method)
