"""The ssh backend's config block."""

from typing import Annotated, Any, Literal

from pydantic import Field

from cloudtrain.launcher.config.kinds import Many, Money, RelativePath, Section, Shorthand, Text


class SshHost(Section):
    """One machine reached by the system's `ssh`; what is left out comes from ssh's own config."""

    host: Text = Field(description="Host name, address or alias in ssh's config.", examples=["gpu1"])
    user: Text | None = Field(None, description="Login name.", examples=["me"])
    port: int | None = Field(None, ge=1, le=65535, description="Port of sshd.", examples=[2222])
    python: Text | None = Field(
        None, description="Interpreter on this host. Default: the block's `python`.", examples=["/opt/py/bin/python"]
    )
    address: Text | None = Field(
        None,
        description="Address for the other hosts while training. Default: found from the host.",
        examples=["10.0.0.4"],
    )
    interface: Text | None = Field(
        None, description="Network interface for training on this host. Default: the block's.", examples=["eth0"]
    )
    workdir: Text | None = Field(
        None, description="Folder for jobs on this host. Default: the block's `workdir`.", examples=["/data/cloudtrain"]
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

    hosts: Many[Annotated[SshHost, Shorthand("text", _host, {"type": "string"})]] = Field(
        (),
        description="The machines, one an instance: `host`, `user@host:port`, or a mapping.",
        examples=[["gpu1", {"host": "gpu2", "python": "/opt/py/bin/python"}]],
    )
    user: Text | None = Field(None, description="Login name on every host.", examples=["me"])
    python: Text = Field("python3", description="Interpreter on every host.", examples=["/opt/py/bin/python"])
    workdir: Text = Field("~/.cloudtrain", description="Folder for jobs on every host.", examples=["/data/cloudtrain"])
    interface: Text | None = Field(
        None,
        description="Network interface for training. Default: the interface to the first host.",
        examples=["eth0"],
    )
    ssh_config: Text | None = Field(
        None, description="ssh's config file. Default: ssh's own choice.", examples=["~/.ssh/config"]
    )
    price_per_hour: Money | None = Field(
        None,
        description="Price of a host for an hour, in US dollars; without a price no budget applies.",
        examples=["2.50 USD"],
    )
    environment: Literal["none", "venv", "conda", "docker", "podman"] = Field(
        "none",
        description="What the job runs in: the `python` as it is; a venv of `requirements`, built once a host; "
        "the `conda` environment; a container of the top-level `image`, named by its digest.",
        examples=["venv"],
    )
    requirements: RelativePath | None = Field(
        None, description="pip's requirements file for `venv`, in the code folder.", examples=["requirements.txt"]
    )
    system_site_packages: bool = Field(
        False, description="Let the venv see the packages of `python`, such as its torch.", examples=[True]
    )
    conda: Text | None = Field(None, description="Conda environment: name or folder.", examples=["train"])
    ports: Text = Field(
        "20000-27999", description="Ports for training between the hosts, for a firewall.", examples=["29400-29499"]
    )
    gpu_locks: Text | None = Field(
        None,
        description="Folder of the GPU locks on every host. Default: a folder that all users share.",
        examples=["/var/lock/cloudtrain"],
    )
    allow_busy: bool = Field(
        False,
        description="Start although others' processes use the GPUs; jobs of cloudtrain never share.",
        examples=[True],
    )
    accept_new_host_keys: bool = Field(
        False, description="Trust the key of a host that is not known yet; a changed key never.", examples=[True]
    )
