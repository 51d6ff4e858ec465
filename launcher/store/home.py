"""The folder of cloudtrain's registry, bundles and local jobs: `$CLOUDTRAIN_HOME`, or the platform's state folder."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path

from ..errors import ConfigError

PRICES = "prices.csv"  # the user's own prices, in the home folder


def where() -> Path:
    """Return the path of the home folder, which may not exist yet.

    Raises RuntimeError for `~nobody`, a user without a home directory, and ConfigError for a relative path, which would
    name a different folder in each directory: jobs sent from one directory would be unknown in the next.
    """
    path = Path(os.environ.get("CLOUDTRAIN_HOME") or _default()).expanduser()
    if not path.is_absolute():
        hint = f"export CLOUDTRAIN_HOME={shlex.quote(str(path.absolute()))}"
        raise ConfigError(f"the state folder `{path}` is a relative path: each directory has another", hint=hint)
    return path


def home() -> Path:
    """Return the home folder, created if missing with access for its owner only. Raises ConfigError if unusable."""
    path = Path(os.environ.get("CLOUDTRAIN_HOME") or _default())
    try:
        path = where()
        path.parent.mkdir(parents=True, exist_ok=True)  # perhaps of several users
        path.mkdir(mode=0o700, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except (OSError, RuntimeError) as error:  # RuntimeError: `~nobody`
        message = f"cloudtrain cannot keep its state in {path}: {getattr(error, 'strerror', None) or error}"
        hint = "set CLOUDTRAIN_HOME to a folder that you can write"
        raise ConfigError(message, where=path, hint=hint) from error
    return path


def identity(folder: Path) -> str:
    """Return the home folder's random identity, created once, for names that are unique on a shared platform."""
    path = folder / "identity"
    try:
        if not path.exists():
            partial = path.with_name(f"identity.{os.getpid()}.{os.urandom(4).hex()}")
            partial.touch(0o600)
            partial.write_text(os.urandom(16).hex())
            with contextlib.suppress(FileExistsError):  # a concurrent process was first
                os.link(partial, path)
            partial.unlink()
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"cloudtrain cannot keep its state: {error.strerror}", where=str(path)) from error


def known_identity(folder: Path) -> str | None:
    """Return the home folder's identity, or None if there is no identity yet; do not create an identity."""
    path = folder / "identity"
    return path.read_text() if path.is_file() else None


def _default() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "cloudtrain"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "cloudtrain"
