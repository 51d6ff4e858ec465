"""The Slurm backend's config block."""

from typing import Literal

from pydantic import Field

from cloudtrain.launcher.config.kinds import Many, Money, Section, Text


class Slurm(Section):
    """A Slurm cluster, whose login node and compute nodes share a disk."""

    login: Text | None = Field(
        None,
        description="Login node: `host` or `user@host`, as ssh takes the name. Default: this machine.",
        examples=["me@cluster"],
    )
    partition: Text | None = Field(
        None, description="Partition, or several with commas. Default: the site's.", examples=["gpu"]
    )
    account: Text | None = Field(None, description="Account that is charged. Default: the user's.", examples=["lab"])
    qos: Text | None = Field(None, description="Quality of service. Default: the account's.", examples=["high"])
    constraint: Text | None = Field(
        None, description="Features that the nodes must have, in sbatch's syntax.", examples=["a100&ib"]
    )
    reservation: Text | None = Field(None, description="Reservation to use.", examples=["course"])
    licenses: Text | None = Field(None, description="Licences, in sbatch's syntax.", examples=["matlab:2"])
    gres: Text | None = Field(
        None,
        description="Generic resources of a node. Default: from `resources.accelerators`, `A100:8` as gpu:a100:8.",
        examples=["gpu:8"],
    )
    cpus_per_node: int | None = Field(
        None, ge=1, description="Cores of the job on a node. Default: one a rank; all with `exclusive`.", examples=[32]
    )
    mem: Text | None = Field(
        None,
        description="Memory on a node, in sbatch's syntax; 0 is all, with `exclusive`. Default: the site's, often 1 GB "
        "a core.",
        examples=["240G"],
    )
    exclusive: bool = Field(False, description="Share the nodes with no other job.", examples=[True])
    nodelist: Text | None = Field(None, description="Nodes that the job must have.", examples=["node[1-2]"])
    exclude: Text | None = Field(None, description="Nodes that the job must not have.", examples=["node7"])
    workdir: Text = Field(
        "~/.cloudtrain",
        description="Folder for jobs, on a disk that login node and compute nodes share.",
        examples=["/scratch/me/cloudtrain"],
    )
    modules: Many[Text] = Field(
        (), description="Environment modules that the job loads, in order.", examples=[["cuda/12.8", "python/3.12"]]
    )
    python: Text = Field(
        "python3",
        description="Interpreter on the compute nodes; with a container, the interpreter in the image.",
        examples=["~/venv/bin/python"],
    )
    container: Literal["none", "apptainer", "pyxis"] = Field(
        "none", description="Program that runs the job in the top-level `image`.", examples=["apptainer"]
    )
    interface: Text | None = Field(
        None,
        description="Network interface for training. Default: the interface to the first node.",
        examples=["ib0"],
    )
    ssh_config: Text | None = Field(
        None, description="ssh's config file for the login node. Default: ssh's own choice.", examples=["~/.ssh/config"]
    )
    price_per_hour: Money | None = Field(
        None,
        description="Price of a node for an hour, in US dollars; without a price no budget applies.",
        examples=["2.50 USD"],
    )
    price_per_gpu_hour: Money | None = Field(
        None,
        description="Price of a GPU for an hour, in place of a node's.",
        examples=["1.80 USD"],
    )
    raw: Many[Text] = Field(
        (), description="Further options of sbatch, `--name` or `--name=value`.", examples=[["--switches=1"]]
    )
