"""The ssh backend's config block."""

from typing import Annotated, Any, Literal

from cloudtrain.launcher.config.kinds import Many, Money, RelativePath, Section, Shorthand, Text, key


class SshHost(Section):
    """One machine reached by the system's `ssh`; what is left out comes from ssh's own config."""

    host: Text = key(..., "Host name, address or alias in ssh's config.", "gpu1")
    user: Text | None = key(None, "Login name.", "me")
    port: int | None = key(None, "Port of sshd.", 2222, ge=1, le=65535)
    python: Text | None = key(None, "Interpreter on this host. Default: the block's `python`.", "/opt/py/bin/python")
    address: Text | None = key(
        None, "Address for the other hosts while training. Default: found from the host.", "10.0.0.4"
    )
    interface: Text | None = key(None, "Network interface for training on this host. Default: the block's.", "eth0")
    workdir: Text | None = key(
        None, "Folder for jobs on this host. Default: the block's `workdir`.", "/data/cloudtrain"
    )


def _host(value: Any) -> Any:
    """Return `user@host:port` as a mapping; a host with several colons is an IPv6 address."""
    if not isinstance(value, str):
        return value
    user, _, address = value.strip().rpartition("@")
    host, _, port = address.rpartition(":")
    has_port = port.isascii() and port.isdigit() and bool(host) and ":" not in host and len(port) < 6
    return {
        "host": host if has_port else address,
        **({"port": int(port)} if has_port else {}),
        **({"user": user} if user else {}),
    }


class Ssh(Section):
    """Your own machines over ssh."""

    hosts: Many[Annotated[SshHost, Shorthand("text", _host, {"type": "string"})]] = key(
        (),
        "The machines, one an instance: `host`, `user@host:port`, or a mapping.",
        ["gpu1", {"host": "gpu2", "python": "/opt/py/bin/python"}],
    )
    user: Text | None = key(None, "Login name on every host.", "me")
    python: Text = key("python3", "Interpreter on every host.", "/opt/py/bin/python")
    workdir: Text = key("~/.cloudtrain", "Folder for jobs on every host.", "/data/cloudtrain")
    interface: Text | None = key(
        None, "Network interface for training. Default: the interface to the first host.", "eth0"
    )
    ssh_config: Text | None = key(None, "ssh's config file. Default: ssh's own choice.", "~/.ssh/config")
    price_per_hour: Money | None = key(
        None, "Price of a host for an hour, in US dollars; without a price no budget applies.", "2.50 USD"
    )
    environment: Literal["none", "venv", "conda", "docker", "podman"] = key(
        "none",
        "What the job runs in: the `python` as it is; a venv of `requirements`, built once a host; "
        "the `conda` environment; a container of the top-level `image`, named by its digest.",
        "venv",
    )
    requirements: RelativePath | None = key(
        None, "pip's requirements file for `venv`, in the code folder.", "requirements.txt"
    )
    system_site_packages: bool = key(False, "Let the venv see the packages of `python`, such as its torch.", True)
    conda: Text | None = key(None, "Conda environment: name or folder.", "train")
    ports: Text = key("20000-27999", "Ports for training between the hosts, for a firewall.", "29400-29499")
    gpu_locks: Text | None = key(
        None, "Folder of the GPU locks on every host. Default: a folder that all users share.", "/var/lock/cloudtrain"
    )
    allow_busy: bool = key(
        False, "Start although others' processes use the GPUs; jobs of cloudtrain never share.", True
    )
    accept_new_host_keys: bool = key(False, "Trust the key of a host that is not known yet; a changed key never.", True)
