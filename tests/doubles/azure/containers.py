"""Lists of a container's blobs, in pages."""

from __future__ import annotations

from collections.abc import Iterator
from email.utils import formatdate
from itertools import islice
from xml.etree import ElementTree

from doubles.azure.blobstore import Blob
from doubles.azure.names import ACCOUNT
from doubles.azure.world import World
from doubles.wire import Answer, Request

__all__ = ["list_blobs"]


def list_blobs(world: World, request: Request, container: str) -> Answer:
    """Return a page of blobs and, with a delimiter, of their common prefixes."""
    world.blobs.check(container)
    query = request.query
    prefix, delimiter, marker = (query.get(name, "") for name in ("prefix", "delimiter", "marker"))
    most = world.settings.blob_page_size
    size = min(int(query.get("maxresults", most)), most)
    entries = (one for one in _entries(world, container, prefix, delimiter) if one[0] >= marker)
    page = list(islice(entries, size + 1))
    root = ElementTree.Element(
        "EnumerationResults", ServiceEndpoint=f"https://{ACCOUNT}.blob.core.windows.net/", ContainerName=container
    )
    for name in ("prefix", "marker", "maxresults", "delimiter"):
        if name in query:
            ElementTree.SubElement(root, "MaxResults" if name == "maxresults" else name.title()).text = query[name]
    parent = ElementTree.SubElement(root, "Blobs")
    for name, blob in page[:size]:
        if blob is None:
            ElementTree.SubElement(ElementTree.SubElement(parent, "BlobPrefix"), "Name").text = name
        else:
            _add(parent, name, blob, "metadata" in query.get("include", ""))
    ElementTree.SubElement(root, "NextMarker").text = page[size][0] if len(page) > size else None
    data = ElementTree.tostring(root, "utf-8", xml_declaration=True)
    return Answer(200, {"Content-Type": "application/xml"}, data)


def _entries(world: World, container: str, prefix: str, delimiter: str) -> Iterator[tuple[str, Blob | None]]:
    last = None
    for name in world.blobs.names(container, prefix):
        rest = name[len(prefix) :]
        if delimiter and delimiter in rest:
            common = prefix + rest.partition(delimiter)[0] + delimiter
            if common != last:
                last = common
                yield common, None
            continue
        blob = world.blobs.find(container, name)
        if blob is not None:  # may be removed meanwhile
            yield name, blob


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
