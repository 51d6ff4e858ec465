"""Faults in an ssh request, found without a connection."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from cloudtrain.entrypoints.contract import JobSpec, SetupSpec
from cloudtrain.launcher.errors import Fault
from cloudtrain.launcher.planning.request_rules import places

MIN_PORTS = 8  # for the agents' connections, and a new port for each start
_HOST = re.compile(r"[A-Za-z0-9_\[:][A-Za-z0-9_.:%\[\]-]{0,253}")
_USER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.@\\+-]{0,63}")
_WORD = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]+")
_CONTAINERS = ("docker", "podman")


def faults(body: dict[str, Any]) -> Iterator[Fault]:
    """Yield the faults of an ssh request."""
    job = JobSpec.load(body["spec"])
    yield from _machines(body, job.nodes)
    for number, host in enumerate(body["hosts"]):
        yield from _of_host(host, f"ssh.hosts[{number}]")
    if body["ports"] is None or body["ports"][1] - body["ports"][0] + 1 < MIN_PORTS:
        hint = f"write it as 20000-27999: at least {MIN_PORTS} ports from 1024 on"
        yield Fault("this is not a range of ports", key="ssh.ports", hint=hint)
    yield from _environment(body["runs_in"], job.setup or SetupSpec())
    for key, uri in places(body["checkpoint_dir"], body["inputs"], body["outputs"]).items():
        if re.match(r"[a-z0-9]+://", uri):
            more = "; checkpoint.mirror may be a bucket" if key == "checkpoint.uri" else ""
            hint = f"use a folder there: --set {key}=/some/path{more}"
            yield Fault(f"the ssh backend cannot reach `{uri}` from the hosts", key=key, hint=hint)
        elif not re.match(r"/|~/", uri):
            hint = "write the whole path, as in /data/sets or ~/sets"
            message = f"`{uri}` is a path on the hosts, and must not depend on where this file is"
            yield Fault(message, key=key, hint=hint)


def _machines(body: dict[str, Any], wanted: int) -> Iterator[Fault]:
    count = len(body["hosts"])
    if not count:
        yield Fault("no hosts are named", key="ssh.hosts", hint="as in `ssh: {hosts: [gpu1, gpu2]}`")
    elif count < wanted:
        hint = "name more, or ask for fewer instances; a host is one instance"
        yield Fault(f"{wanted} instances, but only {count} hosts", key="ssh.hosts", hint=hint)
    for path in sorted({host["ssh_config"] for host in body["hosts"]} - {None}):
        if not re.match(r"/|~/|none$", path):
            hint = "write the whole path, or ~/..."
            yield Fault(f"`{path}` would depend on the folder of each later command", key="ssh.ssh_config", hint=hint)
    for name, times in Counter(host["name"] for host in body["hosts"]).items():
        if times > 1:
            hint = "a host is one instance; behind ports of one name"
            hint += ", give each a `Host` of its own in ssh's configuration"
            yield Fault(f"`{name}` is listed {times} times", key="ssh.hosts", hint=hint)


def _of_host(host: dict[str, Any], key: str) -> Iterator[Fault]:
    name = host["name"]
    if not _HOST.fullmatch(name):
        hint = "as ssh takes it: a name, an address, or an alias of ssh's configuration"
        yield Fault(f"`{name}` is not a valid host name", key=key, hint=hint)
    if host["user"] and not _USER.fullmatch(host["user"]):
        yield Fault(f"`{host['user']}` is not a valid login name", key=f"{key}.user")
    for field in ("python", "workdir", "interface", "address", "ssh_config"):
        value = host[field]
        if value and (not _WORD.fullmatch(value) or value.startswith("-")):
            yield Fault(f"`{field}` has characters that no path or name may have", key=f"{key}.{field}")
    if not re.match(r"/|~/|~$", host["workdir"]):
        hint = "write the whole path, or ~/..."
        yield Fault(f"`{host['workdir']}` is a path on the host", key=f"{key}.workdir", hint=hint)


def _environment(runs_in: dict[str, Any], setup: SetupSpec) -> Iterator[Fault]:
    kind = runs_in["kind"]
    for key, value in (("requirements", setup.requirements), ("setup", setup.commands)):
        if kind in _CONTAINERS and value:
            message = f"`{key}` does not go with `ssh.environment: {kind}`: the job runs in the image as it is"
            yield Fault(message, key=key, hint="put the packages into the image, or choose another `environment`")
    if runs_in["requirements"] and setup.requirements:
        hint = "keep the key at the top level, which applies to all backends"
        yield Fault("`requirements` and `ssh.requirements` exclude each other", key="ssh.requirements", hint=hint)
    needs = {"venv": "requirements", "conda": "conda"}.get(kind)
    if needs and not runs_in[needs]:
        yield Fault(f"`environment: {kind}` needs `{needs}`", key=f"ssh.{needs}", hint=f"--set ssh.{needs}=...")
    for key, its_kind in (("requirements", "venv"), ("conda", "conda")):
        if runs_in[key] and kind != its_kind:
            hint = f"add `environment: {its_kind}`"
            yield Fault(f"`{key}` goes with `environment: {its_kind}`, not with `{kind}`", key=f"ssh.{key}", hint=hint)
    image = runs_in["image"]
    if image and kind not in _CONTAINERS:
        message = "on this backend `image` goes with `environment: docker` or `podman`"
        hint = "--set ssh.environment=docker, or leave `image` out"
        yield Fault(message, key="image", hint=hint, is_warning=True)
    if kind in _CONTAINERS:
        from cloudtrain.entrypoints.environments.images import digest_fault

        if not image:
            yield Fault(f"`environment: {kind}` needs an `image`", key="image", hint="named by its digest")
        elif why := digest_fault(image):
            yield Fault(why, key="image")
