"""Where cloudtrain keeps its registry, bundles and local jobs: `$CLOUDTRAIN_HOME`, or the platform's state folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cloudtrain.launcher.errors import ConfigError

__all__ = ["home"]


def home() -> Path:
    """Return the folder, made if need be, readable by its owner alone. Raises ConfigError where it cannot be used."""
    path = Path(os.environ.get("CLOUDTRAIN_HOME") or _default())
    try:
        path = path.expanduser().absolute()
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


def _default() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "cloudtrain"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "cloudtrain"
