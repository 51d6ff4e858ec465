"""Shell completion: the words for an argument, and the files of the shells."""

from __future__ import annotations

import os
from pathlib import Path

SHELLS = ("bash", "zsh", "fish")


def installed_at(shell: str) -> Path:
    """Return the file in which the shell, or the shell's completion package, looks for cloudtrain's completion."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return {
        "bash": data / "bash-completion" / "completions" / "cloudtrain",
        "zsh": data / "zsh" / "site-functions" / "_cloudtrain",
        "fish": config / "fish" / "completions" / "cloudtrain.fish",
    }[shell]
