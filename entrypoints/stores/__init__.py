"""Stores of named objects: folders, S3, Azure blob storage, Cloud Storage; the table of them, without an import."""

from __future__ import annotations

from typing import NamedTuple


class StoreKind(NamedTuple):
    """A kind of store. The module has a function `open_at(uri, attempts) -> Store`."""

    module: str
    """Of this folder."""
    access: str
    """What gives a user the right to write."""
    form: str = ""
    """An address of the store, as texts show the form; empty: the form has another row."""
    bucket: str = ""
    """The regular expression of a bucket's name; empty: the address has no bucket, or a part of another form."""
    ledger: str = ""
    """The regular expression of a ledger's address, valid in JavaScript too; empty: no ledger in such an address."""


def _of_buckets(module: str, access: str, scheme: str, bucket: str) -> StoreKind:
    return StoreKind(module, access, f"{scheme}://BUCKET", bucket, rf"{scheme}://{bucket}(/[^?#\s]*)?")


_FOLDER = StoreKind(
    "folder", "all users of the ledger need write access to the folder", ledger=r"(file://)?/[^?#\n]+|~/[^?#\n]+"
)
_S3 = _of_buckets("s3", "aws configure, or aws sso login, or ask for the right", "s3", "[A-Za-z0-9._-]{3,255}")
_GCS = _of_buckets(
    "gcs",
    "each user needs the role Storage Object User (roles/storage.objectUser) on the bucket",
    "gs",
    "[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]",
)
_AZURE = StoreKind(
    "azure",
    "az login, or export AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN",
    "https://ACCOUNT.blob.core.windows.net/CONTAINER",
    ledger=r"https://[a-z0-9-]+\.blob\.[a-z0-9.-]+/[a-z0-9$][a-z0-9-]{2,62}(/[^?#\s]*)?",
)
# By the scheme of an address; an address without a scheme is a folder's.
STORES = {
    "file": _FOLDER,
    "s3": _S3,
    "gs": _GCS,
    "https": _AZURE,
    **dict.fromkeys(("abfss", "wasbs"), _AZURE._replace(form="", ledger="")),
}
# A query or a fragment would be a secret or a mistake.
LEDGER_PATTERN = "|".join(kind.ledger for kind in STORES.values() if kind.ledger)


def forms(name: str) -> list[str]:
    """Return the forms of addresses as texts list them, each with `name` behind the bucket or the container."""
    return [f"{kind.form}/{name}" for kind in STORES.values() if kind.form]
