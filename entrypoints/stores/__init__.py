"""Stores of named objects: folders, S3, Azure blob storage, Cloud Storage; the table of them, without an import."""

from __future__ import annotations

from typing import NamedTuple


class StoreKind(NamedTuple):
    """A kind of store. The module has a function `open_at(uri, attempts) -> Store`."""

    module: str
    """Of this folder."""
    access: str
    """What gives a user the right to write."""
    ledger: str
    """The regular expression of a ledger's address, valid in JavaScript too; empty: no ledger in such an address."""


_FOLDER = StoreKind(
    "folder", "all users of the ledger need write access to the folder", r"(file://)?/[^?#\n]+|~/[^?#\n]+"
)
_S3 = StoreKind(
    "s3", "aws configure, or aws sso login, or ask for the right", r"s3://[A-Za-z0-9._-]{3,222}(/[^?#\s]*)?"
)
_GCS = StoreKind(
    "gcs",
    "each user needs the role Storage Object User (roles/storage.objectUser) on the bucket",
    r"gs://[A-Za-z0-9._-]{3,222}(/[^?#\s]*)?",
)
_AZURE = StoreKind(
    "azure",
    "az login, or export AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN",
    r"https://[a-z0-9-]+\.blob\.[a-z0-9.-]+/[a-z0-9$][a-z0-9-]{2,62}(/[^?#\s]*)?",
)
# By the scheme of an address; an address without a scheme is a folder's.
STORES = {
    "file": _FOLDER,
    "s3": _S3,
    "gs": _GCS,
    "https": _AZURE,
    **dict.fromkeys(("abfss", "wasbs"), _AZURE._replace(ledger="")),
}
# A query or a fragment would be a secret or a mistake.
LEDGER_PATTERN = "|".join(kind.ledger for kind in STORES.values() if kind.ledger)
