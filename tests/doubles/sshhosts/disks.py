"""The hosts' disks and /etc before their first boot, written from the test's side."""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

from doubles.sshhosts.machine import BIN, DISKS, SYSTEM_PATH

# Users that may log in, with their home folders. Root's is not /root, because /root may hold the machine's Python.
USERS = {"root": (0, "/home/root"), "alice": (2001, "/home/alice"), "bob": (2002, "/home/bob")}
SYSTEM_UIDS = 1000  # smallest number of a person: the machine's own people are not users of the hosts
OWN_FILES = ("hosts", "hostname", "machine-id")  # of /etc, differing between hosts
# Debian's defaults, without PAM (PAM needs accounts of the machine); the only listener is on this network.
SSHD_CONFIG = f"""\
Port 22
AddressFamily inet
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/authorized_keys
PidFile /run/sshd.pid
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 10:30:100
MaxSessions 10
X11Forwarding no
PrintMotd no
PrintLastLog no
AcceptEnv LANG LC_*
SetEnv PATH={BIN}:{SYSTEM_PATH}
Subsystem sftp internal-sftp
"""


def make_etc(folder: Path) -> None:
    """Make the /etc that all hosts share: links to the machine's files, but own users, groups and name look-up."""
    (folder / "ssh").mkdir(parents=True)
    for name in (*OWN_FILES, "nothing"):
        (folder / name).touch()
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # closed port: the look-up fails at once
    people = [f"{name}:x:{uid}:{uid}:{name}:{home}:/bin/bash\n" for name, (uid, home) in USERS.items()]
    groups = [f"{name}:x:{uid}:\n" for name, (uid, _) in USERS.items()]
    shadow = [f"{name}:*:19000:0:99999:7:::\n" for name in USERS]
    (folder / "passwd").write_text("".join(people + _system_lines(Path("/etc/passwd"))))
    (folder / "group").write_text("".join(groups + _system_lines(Path("/etc/group"))))
    (folder / "shadow").write_text("".join(shadow))
    (folder / "shadow").chmod(0o600)
    ours = set(os.listdir(folder)) | {"shadow-", "passwd-", "group-"}
    for name in os.listdir("/etc"):
        if name not in ours:
            (folder / name).symlink_to(f"/.etc/{name}")


def lay_out(folder: Path, home: Path | None = None) -> None:
    """Make a host's folder with empty disks; `home` replaces the host's /home, as a shared NFS folder would."""
    folder.mkdir()
    if home is not None:
        home.mkdir(exist_ok=True)
        (folder / "home").symlink_to(home)
    for sub in (*DISKS, "data", "root", "etc/ssh"):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    empty(folder)


def write_etc(folder: Path, names: Mapping[str, str], authorized: str) -> None:
    """Write a host's own part of /etc, without its key: `names` maps the hosts' names to their addresses."""
    own = folder / "etc"
    (own / "hosts").write_text("".join(f"{to} {what}\n" for what, to in {"localhost": "127.0.0.1", **names}.items()))
    (own / "hostname").write_text(f"{folder.name}\n")
    (own / "machine-id").write_text(f"{uuid.uuid4().hex}\n")
    (own / "ssh/sshd_config").write_text(SSHD_CONFIG)
    (own / "ssh/authorized_keys").write_text(authorized)


def empty(folder: Path) -> None:
    """Empty a host's disks, but keep the folders that any machine has."""
    for disk in DISKS:
        for entry in os.scandir(folder / disk):
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else Path(entry.path).unlink()
    (folder / "tmp").chmod(0o1777)
    for sub in ("log", "lib", "cache", "tmp"):
        (folder / "var" / sub).mkdir()
    (folder / "var/tmp").chmod(0o1777)
    (folder / "var/run").symlink_to("/run")
    (folder / "var/lock").symlink_to("/run/lock")
    (folder / "opt/bin").mkdir()
    for name, (uid, _) in USERS.items():
        (folder / "home" / name).mkdir(mode=0o700)
        os.chown(folder / "home" / name, uid, uid)


def prefixes() -> tuple[str, ...]:
    """Return the folders that the running Python needs, each once, outer ones first, without those below /usr."""
    real = Path(sys.executable).resolve().parents[1]
    found = sorted({sys.prefix, sys.base_prefix, str(real)})
    return tuple(path for path in found if not f"{path}/".startswith("/usr/"))


def _system_lines(path: Path) -> list[str]:
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.count(":") >= 3]
    taken = {str(uid) for uid, _ in USERS.values()}
    return [line for line in lines if (uid := line.split(":")[2]) not in taken and int(uid) < SYSTEM_UIDS]
