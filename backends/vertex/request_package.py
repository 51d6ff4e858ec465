"""The boot program as a Python package for Google's prebuilt images, which install and run packages by pip.

No network is needed. A wheel is a zip archive with three files of metadata (PEP 427). Equal sources give equal bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile

MODULE = "cloudtrain_boot"
_INFO = f"{MODULE}-1.dist-info"
_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip archive can store


def build(source: str) -> tuple[str, bytes]:
    """Return the wheel's file name and its bytes."""
    parts = {
        f"{MODULE}.py": source,
        f"{_INFO}/METADATA": f"Metadata-Version: 2.1\nName: {MODULE.replace('_', '-')}\nVersion: 1\n",
        f"{_INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: cloudtrain\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{name},sha256={_hash(text)},{len(text.encode())}" for name, text in parts.items()]
    parts[f"{_INFO}/RECORD"] = "\n".join([*record, f"{_INFO}/RECORD,,"]) + "\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, text in parts.items():
            archive.writestr(zipfile.ZipInfo(name, _TIME), text)
    return f"{MODULE}-1-py3-none-any.whl", buffer.getvalue()


def digest(data: bytes) -> str:
    """Return the SHA-256 hex digest of the content, used as a name in the bucket."""
    return hashlib.sha256(data).hexdigest()


def _hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
