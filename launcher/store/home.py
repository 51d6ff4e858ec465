"""Where cloudtrain keeps its registry, bundles and local jobs: `$CLOUDTRAIN_HOME`, or the platform's state folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import sys
from pathlib import Path

from cloudtrain.launcher.errors import ConfigError

__all__ = ["PRICES", "home", "identity", "known_identity", "where"]

PRICES = "prices.csv"  # the user's own, below the home


def where() -> Path:
    """Return the folder's path, whether it is there or not.

    Raises RuntimeError for `~nobody`, who has no home, and ConfigError for a relative path, which would name another
    folder in each directory: jobs that were sent from one directory would be unknown in the next.
    """
    path = Path(os.environ.get("CLOUDTRAIN_HOME") or _default()).expanduser()
    if not path.is_absolute():
        hint = f"export CLOUDTRAIN_HOME={shlex.quote(str(path.absolute()))}"
        raise ConfigError(f"the state folder `{path}` is a relative path: each directory has another", hint=hint)
    return path


def home() -> Path:
    """Return the folder, made if need be, readable by its owner alone. Raises ConfigError where it cannot be used."""
    path = Path(os.environ.get("CLOUDTRAIN_HOME") or _default())
    try:
        path = where()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except (OSError, RuntimeError) as error:  # RuntimeError: `~nobody`
        raise ConfigError(
            f"cloudtrain cannot keep its state in {path}: {getattr(error, 'strerror', None) or error}",
            where=path,
            hint="set CLOUDTRAIN_HOME to a folder that you can write",
        ) from error
    return path


def identity(folder: Path) -> str:
    """Return what tells this home from every other, made once: names are its own on a platform that many share."""
    path = folder / "identity"
    try:
        if not path.exists():
            partial = path.with_name(f"identity.{os.getpid()}.{secrets.token_hex(4)}")
            partial.write_text(secrets.token_hex(16))
            with contextlib.suppress(FileExistsError):  # whoever was first
                os.link(partial, path)
            partial.unlink()
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"cloudtrain cannot keep its state: {error.strerror}", where=str(path)) from error


def known_identity(folder: Path) -> str | None:
    """Return the home's identity, None where it has none yet; nothing is made."""
    path = folder / "identity"
    return path.read_text() if path.is_file() else None


def _default() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "cloudtrain"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "cloudtrain"
