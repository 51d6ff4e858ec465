"""The Slurm backend's config block."""

from typing import Literal

from cloudtrain.launcher.config.kinds import Many, Money, Section, Text, key


class Slurm(Section):
    """A Slurm cluster, whose login node and compute nodes share a disk."""

    login: Text | None = key(
        None, "Login node: `host` or `user@host`, as ssh takes the name. Default: this machine.", "me@cluster"
    )
    partition: Text | None = key(None, "Partition, or several with commas. Default: the site's.", "gpu")
    account: Text | None = key(None, "Account that is charged. Default: the user's.", "lab")
    qos: Text | None = key(None, "Quality of service. Default: the account's.", "high")
    constraint: Text | None = key(None, "Features that the nodes must have, in sbatch's syntax.", "a100&ib")
    reservation: Text | None = key(None, "Reservation to use.", "course")
    licenses: Text | None = key(None, "Licences, in sbatch's syntax.", "matlab:2")
    gres: Text | None = key(
        None, "Generic resources of a node. Default: from `resources.accelerators`, `A100:8` as gpu:a100:8.", "gpu:8"
    )
    cpus_per_node: int | None = key(
        None, "Cores of the job on a node. Default: one a rank; all with `exclusive`.", 32, ge=1
    )
    mem: Text | None = key(
        None,
        "Memory on a node, in sbatch's syntax; 0 is all, with `exclusive`. Default: the site's, often 1 GB a core.",
        "240G",
    )
    exclusive: bool = key(False, "Share the nodes with no other job.", True)
    nodelist: Text | None = key(None, "Nodes that the job must have.", "node[1-2]")
    exclude: Text | None = key(None, "Nodes that the job must not have.", "node7")
    workdir: Text = key(
        "~/.cloudtrain", "Folder for jobs, on a disk that login node and compute nodes share.", "/scratch/me/cloudtrain"
    )
    modules: Many[Text] = key((), "Environment modules that the job loads, in order.", ["cuda/12.8", "python/3.12"])
    python: Text = key(
        "python3",
        "Interpreter on the compute nodes; with a container, the interpreter in the image.",
        "~/venv/bin/python",
    )
    container: Literal["none", "apptainer", "pyxis"] = key(
        "none", "Program that runs the job in the top-level `image`.", "apptainer"
    )
    interface: Text | None = key(
        None, "Network interface for training. Default: the interface to the first node.", "ib0"
    )
    variables: bool = key(
        False,
        "Show Slurm's variables to the ranks, with each rank's own numbers. Default: none, but CLOUDTRAIN_SLURM_JOB.",
        True,
    )
    ssh_config: Text | None = key(
        None, "ssh's config file for the login node. Default: ssh's own choice.", "~/.ssh/config"
    )
    price_per_hour: Money | None = key(
        None, "Price of a node for an hour, in US dollars; without a price no budget applies.", "2.50 USD"
    )
    price_per_gpu_hour: Money | None = key(None, "Price of a GPU for an hour, in place of a node's.", "1.80 USD")
    raw: Many[Text] = key((), "Further options of sbatch, `--name` or `--name=value`.", ["--switches=1"])
