"""The client's folder: a key, the hosts' keys, `ssh` configurations, and an `ssh` that starts in the hosts' network."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

WRAPPED = ("ssh", "scp", "sftp", "ssh-keyscan")  # rsync and git take the first `ssh` of the PATH
# The settings of the machine's user have no effect: no other key, no agent, no other list of known hosts. The newer key
# exchange of OpenSSH 9 (sntrup761) takes 0.15 s of processor time at each end, and both ends are this machine.
HOST = """\
Host {alias}
    HostName {address}
"""
ALL = """\
Host *
    User root
    IdentityFile {folder}/key
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    UpdateHostKeys no
    BatchMode yes
    KexAlgorithms curve25519-sha256
"""


def make_key(path: Path) -> subprocess.Popen[bytes]:
    """Start making a key without a passphrase, next to its public half; both files exist when the process has ended."""
    return subprocess.Popen(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.parent.name, "-f", path])


def write_known_hosts(folder: Path, keys: Mapping[tuple[str, str], str]) -> None:
    """Write the hosts' public keys, by name and address, to the file of known hosts."""
    lines = [f"{name},{address} {' '.join(key.split()[:2])}\n" for (name, address), key in keys.items()]
    (folder / "known_hosts").write_text("".join(lines))


def write_config(folder: Path, file: str, hosts: Mapping[str, str], *, bastion: str | None = None) -> Path:
    """Write a configuration for `ssh -F`; only a bastion can look up the names of the hosts behind the bastion."""
    text = ""
    for alias, address in hosts.items():
        is_behind = bastion not in (None, alias)
        text += HOST.format(alias=alias, address=alias if is_behind else address)
        text += f"    ProxyJump {bastion}\n" if is_behind else ""
    path = folder / file
    path.write_text(text + ALL.format(folder=folder))
    return path


def make_wrappers(folder: Path, inside: list[str]) -> str:
    """Write programs that begin with the words `inside`; return a PATH with these programs first."""
    folder.mkdir()
    for name in WRAPPED:
        real = shutil.which(name)
        if real is not None:
            (folder / name).write_text(f'#!/bin/sh\nexec {" ".join(inside)} {real} "$@"\n')
            (folder / name).chmod(0o755)
    return f"{folder}:{os.environ.get('PATH', os.defpath)}"
