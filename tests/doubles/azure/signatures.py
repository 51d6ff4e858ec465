"""Shared access signatures and SharedKey, made and verified as in the storage service's documentation."""

import base64
import hashlib
import hmac
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from urllib.parse import parse_qsl, quote, unquote, urlencode

from doubles.azure.errors import AzureError
from doubles.azure.names import ACCOUNT, ACCOUNT_KEY
from doubles.wire import Request

VERSION = "2023-11-03"  # of the issued signatures
FORMAT = "%Y-%m-%dT%H:%M:%SZ"
REFUSED = (
    "Server failed to authenticate the request. Make sure the value of Authorization header is formed correctly "
    "including the signature."
)
_SIGNED_HEADERS = (
    *("content-encoding", "content-language", "content-length", "content-md5", "content-type", "date"),
    *("if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range"),
)


def sas(container: str, blob: str | None, permissions: str, lasts_s: float, serial: int) -> str:
    """Return a query string that gives permissions on a blob, or on a whole container."""
    now = datetime.now(timezone.utc)
    ends = FORMAT if lasts_s >= 10 else "%Y-%m-%dT%H:%M:%S.%f0Z"  # whole seconds, if precise enough
    query = {
        "sv": VERSION,
        "spr": "https",
        "st": (now - timedelta(minutes=15, seconds=serial % 600)).strftime(FORMAT),  # distinct for each serial
        "se": (now + timedelta(seconds=lasts_s)).strftime(ends),
        "sr": "c" if blob is None else "b",
        "sp": permissions,
    }
    return urlencode({**query, "sig": _sign(_sas_text(query, container, blob))})


def check_sas(request: Request, container: str, blob: str | None, needed: str) -> None:
    """Raise AzureError unless the signature is correct and valid now, and gives one of the permissions."""
    query = request.query
    resource_blob = None if query.get("sr") == "c" else blob
    text = _sas_text(query, container, resource_blob)
    if not hmac.compare_digest(_sign(text).encode(), query["sig"].encode()):
        raise AzureError(
            403, "AuthenticationFailed", f"{REFUSED} Signature did not match. String to sign used was {text}"
        )
    now = datetime.now(timezone.utc)
    if _time(query.get("se", "")) <= now or ("st" in query and _time(query["st"]) > now):
        between = f"[{query.get('st', '')}] - [{query.get('se', '')}]"
        message = f"{REFUSED} Signature not valid in the specified time frame: {between} - Current [{now}]"
        raise AzureError(403, "AuthenticationFailed", message)
    if query.get("sr") == "b" and blob is None:
        raise AzureError(403, "AuthorizationResourceTypeMismatch", "This signature is of a blob, not of a container.")
    if not set(needed) & set(query.get("sp", "")):
        message = "This request is not authorized to perform this operation using this permission."
        raise AzureError(403, "AuthorizationPermissionMismatch", message)


def check_shared_key(request: Request) -> None:
    """Raise AzureError unless the Authorization header was made with the account's key."""
    headers = request.headers
    values = [headers.get(name, "") for name in _SIGNED_HEADERS]
    values[2] = "" if values[2] == "0" else values[2]
    if "x-ms-date" in headers:
        values[5] = ""
    ours = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers) if name.startswith("x-ms-"))
    parameters = parse_qsl(request.target.partition("?")[2], keep_blank_values=True)
    lists: dict[str, list[str]] = {}
    for name, value in parameters:
        lists.setdefault(name.lower(), []).append(value)
    query = "".join(f"\n{name}:{','.join(sorted(lists[name]))}" for name in sorted(lists))
    text = "\n".join([request.method, *values]) + f"\n{ours}/{ACCOUNT}{request.raw_path}{query}"
    expected = f"SharedKey {ACCOUNT}:{_sign(text)}"
    if not hmac.compare_digest(expected.encode(), headers["authorization"].encode()):
        raise AzureError(403, "AuthenticationFailed", f"{REFUSED} The string to sign was {text!r}")


def _sas_text(query: Mapping[str, str], container: str, blob: str | None) -> str:
    """Return the signed text: versions from 2020-12-06 on have `ses`, from 2018-11-09 on `sr` and snapshot."""
    resource = f"/blob/{ACCOUNT}/{container}" + ("" if blob is None else f"/{blob}")
    names = ["si", "sip", "spr", "sv", "sr", "snapshot"]
    names += ["ses"] if query.get("sv", "") >= "2020-12-06" else []
    names += ["rscc", "rscd", "rsce", "rscl", "rsct"]
    first = [query.get(name, "") for name in ("sp", "st", "se")]
    return "\n".join([*first, resource, *(query.get(name, "") for name in names)])


def _sign(text: str) -> str:
    digest = hmac.new(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256).digest()
    return base64.b64encode(digest).decode()


def _time(text: str) -> datetime:
    for form in (FORMAT, "%Y-%m-%dT%H:%MZ", "%Y-%m-%d"):
        try:
            return datetime.strptime(text, form).replace(tzinfo=timezone.utc)
        except ValueError:
            continue
    whole, _, fraction = text.rstrip("Z").partition(".")
    try:
        moment = datetime.strptime(whole, FORMAT[:-1]).replace(tzinfo=timezone.utc)
        return moment + timedelta(seconds=float(f"0.{fraction or 0}"))
    except ValueError:
        raise AzureError(403, "AuthenticationFailed", f"{REFUSED} {quote(unquote(text))} is no time.") from None
