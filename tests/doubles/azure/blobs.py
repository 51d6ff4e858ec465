"""<account>.blob.core.windows.net: authorization, conditions, ranges, operations on blobs, and lists in pages."""

import base64
import hashlib
import re
from email.utils import formatdate
from itertools import islice
from xml.etree import ElementTree

from doubles.azure.blobstore import Blob
from doubles.azure.errors import AzureError
from doubles.azure.names import ACCOUNT, JOB_CLIENT, TENANT
from doubles.azure.signatures import check_sas, check_shared_key
from doubles.azure.world import World
from doubles.wire import Answer, Request

LOGIN = f"https://login.microsoftonline.com/{TENANT}/oauth2/authorize"
CHALLENGE = f"Bearer authorization_uri={LOGIN} resource_id=https://storage.azure.com"
NOT_ALLOWED = "This request is not authorized to perform this operation using this permission."
_READS = ("GET", "HEAD")
_UNLESS = ((None, True), (None, False), ("*", False))  # If-None-Match, and whether the call reads


def operation(request: Request) -> str | None:
    """Return the name of the requested operation on a blob or a container."""
    query, method = request.query, request.method
    is_blob = "/" in request.path.strip("/")
    if query.get("restype") == "container" or not is_blob:
        return "blob.list" if query.get("comp") == "list" and "restype" in query else None
    parts = {"block": "blob.put_block", "blocklist": "blob.put_blocklist", "metadata": "blob.metadata"}
    if method == "PUT":
        return parts.get(query["comp"]) if "comp" in query else "blob.put"
    return {"GET": "blob.get", "HEAD": "blob.head", "DELETE": "blob.delete"}.get(method)


def authorize(world: World, request: Request, name: str) -> None:
    """Raise AzureError unless the signature, the key or the token allows the operation."""
    container, _, blob = request.path.lstrip("/").partition("/")
    authorization = request.headers.get("authorization", "")
    if "sig" in request.query:
        _check_keys(world)
        check_sas(request, container, blob or None, _PERMISSIONS.get(name, "-"))
    elif authorization.startswith("SharedKey "):
        _check_keys(world)
        check_shared_key(request)
    elif authorization:
        try:
            claims = world.tokens.claims(authorization, "blob")
        except AzureError as error:
            challenge = {"WWW-Authenticate": CHALLENGE}
            message = f"Server failed to authenticate the request. {error.message}"
            raise AzureError(401, "InvalidAuthenticationInfo", message, challenge) from None
        is_job = claims["appid"] == JOB_CLIENT
        role = world.settings.job_storage_role if is_job else world.settings.storage_role
        if role == "none" or (role == "reader" and request.method not in _READS):
            raise AzureError(403, "AuthorizationPermissionMismatch", NOT_ALLOWED)
    else:
        message = "Server failed to authenticate the request. Please refer to the information in the www-authenticate."
        raise AzureError(401, "NoAuthenticationInformation", message, {"WWW-Authenticate": CHALLENGE})


def get(world: World, request: Request, container: str, name: str) -> Answer:
    """Return the blob, or its requested range."""
    with world.blobs.lock:
        blob = _found(world, request, container, name)
        bounds = _bounds(request, blob.size)
        headers = _properties(blob)
        if bounds is None:
            return Answer(200, headers, world.blobs.read(container, name, 0, blob.size))
        start, end = bounds
        data = world.blobs.read(container, name, start, end - start)
    headers["Content-Range"] = f"bytes {start}-{start + len(data) - 1}/{blob.size}"
    whole = headers.pop("Content-MD5", None)
    if whole is not None:
        headers["x-ms-blob-content-md5"] = whole
    if request.headers.get("x-ms-range-get-content-md5", "").lower() == "true":
        headers["Content-MD5"] = base64.b64encode(hashlib.md5(data).digest()).decode()
    return Answer(206, headers, data)


def head(world: World, request: Request, container: str, name: str) -> Answer:
    """Return the blob's properties."""
    blob = _found(world, request, container, name)
    return Answer(200, _properties(blob), length=blob.size)


def put(world: World, request: Request, container: str, name: str) -> Answer:
    """Write a block blob whole."""
    headers = request.headers
    kind = headers.get("x-ms-blob-type", "")
    if kind != "BlockBlob":
        raise AzureError(400, "InvalidHeaderValue", f"The value for x-ms-blob-type, {kind!r}, is not supported.")
    _check_md5(request)
    with world.blobs.lock:
        world.blobs.check(container)
        old = world.blobs.find(container, name)
        _check_conditions(request, old)
        blob = Blob(metadata=_metadata(request), content_type=_content_type(request))
        if old is not None:
            blob.created = old.created
        blob.md5 = headers.get("x-ms-blob-content-md5") or None
        return _written(world.blobs.put(container, name, request.body, blob))


def stage(world: World, request: Request, container: str, name: str) -> Answer:
    """Keep a block."""
    _check_md5(request)
    world.blobs.check(container)
    world.blobs.path(container, name)
    world.blobs.stage(container, name, request.query["blockid"], request.body)
    return Answer(201, {"x-ms-request-server-encrypted": "true"})


def commit(world: World, request: Request, container: str, name: str) -> Answer:
    """Make a blob of blocks."""
    try:
        blocks = [(one.tag, one.text or "") for one in ElementTree.fromstring(request.body)]
    except ElementTree.ParseError:
        raise AzureError(400, "InvalidXmlDocument", "XML specified is not syntactically valid.") from None
    with world.blobs.lock:
        world.blobs.check(container)
        _check_conditions(request, world.blobs.find(container, name))
        blob = Blob(metadata=_metadata(request), content_type=_content_type(request))
        written = world.blobs.commit(container, name, blocks, blob)
        written.md5 = request.headers.get("x-ms-blob-content-md5")  # by default a blob of blocks has no MD5
        return _written(written)


def set_metadata(world: World, request: Request, container: str, name: str) -> Answer:
    """Set the blob's metadata."""
    with world.blobs.lock:
        _found(world, request, container, name)
        answer = _written(world.blobs.annotate(container, name, _metadata(request)))
    answer.status = 200
    return answer


def delete(world: World, request: Request, container: str, name: str) -> Answer:
    """Remove the blob."""
    with world.blobs.lock:
        _found(world, request, container, name)
        world.blobs.delete(container, name)
    return Answer(202, {"x-ms-delete-type-permanent": "true"})


# Operation -> letters of a signature; any single letter is sufficient.
_PERMISSIONS = {
    "blob.get": "r",
    "blob.head": "r",
    "blob.list": "l",
    "blob.delete": "d",
    "blob.put": "wc",
    "blob.put_block": "wc",
    "blob.put_blocklist": "wc",
    "blob.metadata": "w",
}


def _check_keys(world: World) -> None:
    if not world.settings.storage_keys:
        message = "Key based authentication is not permitted on this storage account."
        raise AzureError(403, "KeyBasedAuthenticationNotPermitted", message)


def _found(world: World, request: Request, container: str, name: str) -> Blob:
    world.blobs.check(container)
    blob = world.blobs.find(container, name)
    if blob is None:
        raise AzureError(404, "BlobNotFound", "The specified blob does not exist.")
    _check_conditions(request, blob)
    return blob


def _check_conditions(request: Request, blob: Blob | None) -> None:
    """Raise AzureError if a condition does not hold, and for a condition that the stand-in does not know."""
    headers = request.headers
    unless, wanted = headers.get("if-none-match"), headers.get("if-match")
    is_reading = request.method in _READS
    if {"if-modified-since", "if-unmodified-since"} & set(headers) or (unless, is_reading) not in _UNLESS:
        raise AzureError(400, "InvalidHeaderValue", "The stand-in knows no such condition.")
    if blob is not None and unless == "*":
        raise AzureError(409, "BlobAlreadyExists", "The specified blob already exists.")
    if wanted is not None and (blob is None or wanted not in ("*", blob.etag)):
        raise AzureError(412, "ConditionNotMet", "The condition specified using HTTP conditional header(s) is not met.")


def _bounds(request: Request, size: int) -> tuple[int, int] | None:
    """Return the requested half-open range. Raises AzureError past the end, and for a suffix range: Azure has none."""
    text = request.headers.get("x-ms-range") or request.headers.get("range")
    if text is None:
        return None
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", text.strip())
    if found is None:  # the choice among several errors of Azure is a guess
        message = "The value for one of the HTTP headers is not in the correct format."
        raise AzureError(400, "InvalidHeaderValue", message)
    start, end = int(found[1]), int(found[2]) + 1 if found[2] else size
    if start >= size:
        message = "The range specified is invalid for the current size of the resource."
        raise AzureError(416, "InvalidRange", message, {"Content-Range": f"bytes */{size}"})
    return start, min(end, size)


def _properties(blob: Blob) -> dict[str, str]:
    headers = {
        "Content-Type": blob.content_type,
        "Last-Modified": formatdate(blob.modified, usegmt=True),
        "ETag": blob.etag,
        "Accept-Ranges": "bytes",
        "x-ms-creation-time": formatdate(blob.created, usegmt=True),
        "x-ms-blob-type": blob.kind,
        "x-ms-lease-status": "unlocked",
        "x-ms-lease-state": "available",
        "x-ms-server-encrypted": "true",
        **{f"x-ms-meta-{name}": value for name, value in blob.metadata.items()},
    }
    if blob.md5:
        headers["Content-MD5"] = blob.md5
    if blob.kind == "AppendBlob":
        headers["x-ms-blob-committed-block-count"] = "1"
    return headers


def _metadata(request: Request) -> dict[str, str]:
    prefix = "x-ms-meta-"
    return {name.removeprefix(prefix): value for name, value in request.headers.items() if name.startswith(prefix)}


def _content_type(request: Request) -> str:
    headers = request.headers
    return headers.get("x-ms-blob-content-type") or headers.get("content-type") or "application/octet-stream"


def _check_md5(request: Request) -> None:
    told = request.headers.get("content-md5")
    if told and told != base64.b64encode(hashlib.md5(request.body).digest()).decode():
        message = "The MD5 value specified in the request did not match with the MD5 value calculated by the server."
        raise AzureError(400, "Md5Mismatch", message)


def _written(blob: Blob) -> Answer:
    headers = {"ETag": blob.etag, "Last-Modified": formatdate(blob.modified, usegmt=True)}
    headers["x-ms-request-server-encrypted"] = "true"
    if blob.md5:
        headers["Content-MD5"] = blob.md5
    return Answer(201, headers)


def list_blobs(world: World, request: Request, container: str) -> Answer:
    """Return a page of blobs."""
    world.blobs.check(container)
    query = request.query
    if "delimiter" in query:
        raise AzureError(400, "InvalidQueryParameterValue", "The stand-in's list knows no delimiter.")
    prefix, marker = query.get("prefix", ""), query.get("marker", "")
    most = world.settings.blob_page_size
    size = min(int(query.get("maxresults", most)), most)
    entries = ((name, world.blobs.find(container, name)) for name in world.blobs.names(container, prefix))
    told = world.listing.told(
        container, ((name, one, one.modified) for name, one in entries if one is not None), prefix
    )
    page = list(islice(((name, one) for name, one in told if name >= marker), size + 1))
    root = ElementTree.Element(
        "EnumerationResults", ServiceEndpoint=f"https://{ACCOUNT}.blob.core.windows.net/", ContainerName=container
    )
    for name in ("prefix", "marker", "maxresults"):
        if name in query:
            ElementTree.SubElement(root, "MaxResults" if name == "maxresults" else name.title()).text = query[name]
    parent = ElementTree.SubElement(root, "Blobs")
    for name, blob in page[:size]:
        _add(parent, name, blob, "metadata" in query.get("include", ""))
    ElementTree.SubElement(root, "NextMarker").text = page[size][0] if len(page) > size else None
    data = ElementTree.tostring(root, "utf-8", xml_declaration=True)
    return Answer(200, {"Content-Type": "application/xml"}, data)


def _add(parent: ElementTree.Element, name: str, blob: Blob, with_metadata: bool) -> None:
    element = ElementTree.SubElement(parent, "Blob")
    ElementTree.SubElement(element, "Name").text = name
    properties = ElementTree.SubElement(element, "Properties")
    told = {
        "Creation-Time": formatdate(blob.created, usegmt=True),
        "Last-Modified": formatdate(blob.modified, usegmt=True),
        "Etag": blob.etag.strip('"'),
        "Content-Length": str(blob.size),
        "Content-Type": blob.content_type,
        "Content-MD5": blob.md5,
        "BlobType": blob.kind,
        "AccessTier": "Hot" if blob.kind == "BlockBlob" else None,
        "LeaseStatus": "unlocked",
        "LeaseState": "available",
        "ServerEncrypted": "true",
    }
    for key, value in told.items():
        if value is not None:
            ElementTree.SubElement(properties, key).text = value
    if with_metadata:
        metadata = ElementTree.SubElement(element, "Metadata")
        for key, value in blob.metadata.items():
            ElementTree.SubElement(metadata, key).text = value
