"""What the address of a job's files means, and what is wrong with an address, by its text alone.

The rule for a file or a folder is the same on all backends: a folder ends in a slash, or has no ending. SageMaker
takes all objects whose names begin with an address, so the request has the slash of every folder.
"""

from __future__ import annotations

import re

from cloudtrain.entrypoints.stores import STORES

# Data beside the config file that goes along, with the hash of its files; a folder ends in a slash: `data/@sha256:...`.
PINNED = re.compile(r"(?P<path>.*?(?P<name>[^/]*)/?)@sha256:(?P<digest>[0-9a-f]{64})", re.DOTALL)
_ELSEWHERE = re.compile(r"[/~\\]|[A-Za-z][\w+.-]*:")  # also `azureml:NAME:1` and `C:\...`
_PLACE = re.compile(r".*/data/[0-9a-f]{64}/[^/]+", re.DOTALL)
SERVICES = {"https": "blob", "abfss": "dfs", "wasbs": "blob"}

# Names of buckets. Sources, of 2026-11: AWS's "General purpose bucket naming rules", Google's "Bucket names".
NAMES = {
    "s3": re.compile(r"(?!.*\.\.)(?!(\d+\.){3}\d+$)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"),
    "gs": re.compile(rf"(?!goog)(?![a-z0-9_-]{{64}}){STORES['gs'].bucket}"),
}
RULES = {"s3": "3 to 63 small letters, digits, `-` and `.`", "gs": "3 to 63 small letters, digits, `-`, `_` and `.`"}
ACCESS_POINT = re.compile(r"s3://arn:aws[a-z-]*:s3:[a-z0-9-]+:\d{12}:accesspoint[/:][a-z0-9-]+(/|$)")
_ENDING = re.compile(r"[^./]\.(?!(?:v\d+|zarr|lance)$)(?:[A-Za-z][A-Za-z0-9]*|7z)$")  # `v1.0` and `data.v2` are folders
# Other spellings of an address, and the store that is meant.
_SPELLINGS = (
    (r"(?:(?i:s3[an]?):/*(?:arn:aws[a-z-]*:s3:::)?|arn:aws[a-z-]*:s3:::)([^/].*)", "s3"),
    (r"https?://(?:s3[.-][^/]*amazonaws\.com/(.+)|(.+)\.s3[.-][^/]*amazonaws\.com(/.*)?)", "s3"),
    (r"(?i:gs|gcs):/*([^/].*)|/gcs/(.+)", "gs"),
    (r"https?://storage\.(?:googleapis|cloud\.google)\.com/([^?;]+).*", "gs"),
    (r"https?://console\.cloud\.google\.com/storage/browser/([^?;]+).*", "gs"),
)


def is_file(uri: str) -> bool:
    """Return whether the address is of one file: the last name has an ending (`labels.csv`), and no slash follows."""
    _, slash, last = uri.partition("://")[2].rpartition("/")
    return bool(slash and (_ENDING.search(last) or _PLACE.fullmatch(uri)))


def is_beside(uri: str) -> bool:
    """Return whether the address of an input is a relative path: beside the config file, on the user's machine."""
    return not _ELSEWHERE.match(uri)


def path_of(uri: str) -> str:
    """Return an input that goes along without its hash, any other address unchanged."""
    found = PINNED.fullmatch(uri)
    return found["path"] if found and is_beside(uri) else uri


def placed(root: str, uri: str) -> str:
    """Return where the job finds an input: data that goes along below `root`, by content, else the address itself.

    Without a hash, as in a check without a submit, the digits are zeros.
    """
    if not is_beside(uri):
        return uri
    found = PINNED.fullmatch(uri) or PINNED.fullmatch(f"{uri}@sha256:{'0' * 64}")
    assert found is not None
    return f"{root}/data/{found['digest']}/{'' if found['path'].endswith('/') else found['name']}"


def explicit(uri: str) -> str:
    """Return the address with the slash of a folder."""
    return uri if uri.endswith("/") or is_file(uri) else f"{uri}/"


def above_pattern(uri: str) -> str:
    """Return the folder around the first part with `*`, `?` or `[`; empty if the address is not a pattern."""
    uri = uri.partition("?")[0] if re.match(r"https?://", uri) else uri  # there `?` begins the query
    found = re.search(r"[*?\[]", uri)
    return f"{uri[: found.start()].rpartition('/')[0]}/" if found else ""


def meant(uri: str) -> str:
    """Return an address of S3 or Cloud Storage in another spelling as `s3://...` or `gs://...`; else an empty text."""
    for pattern, store in _SPELLINGS:
        if found := re.fullmatch(pattern, uri):
            return f"{store}://{''.join(part or '' for part in found.groups())}"
    return ""


def bucket_fault(bucket: str, store: str) -> tuple[str, str] | None:
    """Return what is wrong with the name of a bucket of S3 or Cloud Storage, and the cure; None for a valid name."""
    near = re.sub(r"^arn:aws[a-z-]*:s3:::|^[a-z0-9]+://|/.*$", "", bucket.lower())
    cure = f"did you mean `{near}`?" if NAMES[store].fullmatch(near) else RULES[store]
    return None if NAMES[store].fullmatch(bucket) else (f"`{bucket}` is not a bucket name", cure)


def in_bucket(uri: str, store: str) -> tuple[str, str] | None:
    """Return what is wrong with an address that should be in `store` (s3 or gs), and the cure; None if nothing is.

    The message is empty for a path, and for an address of another store.
    """
    form, near = f"{STORES[store].form}/PREFIX", meant(uri)
    if uri.startswith(f"{store}://"):
        bucket = uri.partition("://")[2].partition("/")[0]
        if not bucket:
            return f"`{uri}` names no bucket", f"as in {form}"
        return None if ACCESS_POINT.match(uri) else bucket_fault(bucket, store)
    if near.startswith(f"{store}://"):
        return f"`{uri}` is not an address of the form {form}", f"did you mean `{near}`?"
    return "", f"as in {form}"


def at_azure(store: str, rest: str) -> tuple[str, str]:
    """Return a message and a hint about a faulty address of Azure Blob Storage; empty texts if the address is right."""
    if "?" in rest:  # do not print the query: the query may hold a signature
        return "the address continues after a `?`", "leave that out; give a SAS as AZURE_STORAGE_SAS_TOKEN in `secrets`"
    first, _, path = rest.removeprefix("//").partition("/")
    container, at, host = (path.partition("/")[0], "@", first) if store == "https" else first.partition("@")
    place = f"{store}://CONTAINER@ACCOUNT.{SERVICES[store]}.core.windows.net"
    form = f"{STORES[store].form if store == 'https' else place}/PREFIX"
    services = "blob" if store == "https" else "blob|dfs"
    label = r"[a-z0-9-]+"
    if not rest.startswith("//") or not at:
        return "this is not an address of Azure's blob storage", f"as in {form}"
    if not re.fullmatch(rf"{label}(\.{label})*\.({services})(\.{label})+", host, re.IGNORECASE):
        message = f"`{host}` is not a host of Azure's blob storage"
        if bucket := re.fullmatch(r"(.+)\.s3[.-].*amazonaws\.com", host):
            return message, f"did you mean `s3://{bucket[1]}/{path}`?"
        if re.fullmatch(r"storage\.(googleapis|cloud\.google)\.com", host):
            return message, f"did you mean `gs://{path}`?"
        near = re.fullmatch(rf"({label})\.{label}\.(core(\.{label})+)", host, re.IGNORECASE)
        return message, f"did you mean `{near[1]}.{SERVICES[store]}.{near[2]}`?" if near else f"as in {form}"
    if not re.fullmatch(r"[a-z0-9](-?[a-z0-9]){2,62}|\$web|\$root", container) or len(container) > 63:
        message = f"`{container}` is not a valid container name" if container else "the address names no container"
        return message, f"3 to 63 of a-z, 0-9 and -, as in {form}"
    return "", ""
