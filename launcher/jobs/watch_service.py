"""Keeps `cloudtrain watch` running in the background: a unit of the user's systemd, or a line for cron."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from ..errors import ConfigError
from ..store.home import home

NAME = "cloudtrain-watch.service"


def install(every: str) -> Path:
    """Write the unit of this user, and return its path. The unit is neither enabled nor started."""
    path = unit_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(unit(every), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the unit cannot be written: {error.strerror}", where=path) from error
    return path


def uninstall() -> Path | None:
    """Remove the unit; return its path, or None if the unit does not exist."""
    path = unit_path()
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"the unit cannot be removed: {error.strerror}", where=path) from error
    return path


def unit(every: str) -> str:
    """Return the unit's text. Addresses and secrets come from a file of the user, and are not part of the unit."""
    command = " ".join(_quoted(word) for word in [*_command(), "watch", "--all", "--every", every])
    variables = {"CLOUDTRAIN_HOME": str(home()), "PATH": os.environ.get("PATH", os.defpath)}
    lines = [f"Environment={_quoted(f'{name}={value}', is_command=False)}" for name, value in variables.items()]
    lines.append(f"EnvironmentFile=-{str(environment_file()).replace('%', '%%')}")
    text = "[Unit]\nDescription=Watch cloudtrain's jobs: alerts, retries, budgets\n\n[Service]\n" + "\n".join(lines)
    text += f"\nExecStart={command}\nRestart=on-failure\nRestartSec=30\n\n[Install]\nWantedBy=default.target\n"
    return text


def cron_line() -> str:
    """Return the crontab line that polls all jobs every minute; cron reads an unescaped % as the end of a line."""
    command = shlex.join([*_command(), "watch", "--all", "--once"])
    text = f"* * * * * CLOUDTRAIN_HOME={shlex.quote(str(home()))} {command}"
    return text.replace("%", r"\%")


def unit_path() -> Path:
    """Return the path of the unit, which may not exist."""
    return _config_home() / "systemd" / "user" / NAME


def environment_file() -> Path:
    """Return the path of the optional file of variables for the unit: `SLACK_URL=https://...`."""
    return _config_home() / "cloudtrain" / "watch.env"


def _config_home() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _command() -> list[str]:
    beside = Path(sys.executable).with_name("cloudtrain")
    if beside.exists():
        return [str(beside)]
    found = shutil.which("cloudtrain")
    return [found] if found else [sys.executable, "-c", "from cloudtrain.launcher.cli import main; main()"]


def _quoted(word: str, *, is_command: bool = True) -> str:
    """Return the word in systemd's quotes: % and $ are doubled where systemd would expand them."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text.replace("$", "$$") if is_command else text}"'
