"""Slurm: a cluster's batch jobs, from a login node or over ssh to a login node."""

from cloudtrain.launcher.backend_table import BackendTraits

TRAITS = BackendTraits(
    block="cloudtrain.backends.slurm.block.Slurm",
    help="A Slurm cluster.",
    example={"login": "me@cluster", "partition": "gpu"},
    foreign_keys={
        "login": "host login_node ssh_host",
        "partition": "queue",
        "account": "slurm_account project",
        "constraint": "features",
        "cpus_per_node": "cpus_per_task cpus",
        "mem": "memory mem_gb",
        "raw": "srun_args sbatch_args extra_args additional_parameters",
    },
    aliases=("sbatch", "slurmctld"),
    queues=True,
    own_machines="slurm: {login: me@cluster}",
    exclusive=(("price_per_hour", "price_per_gpu_hour"),),
    data_place="the work folder on the shared disk",
    data_copy="rsync -a {path} LOGIN:/scratch/me/",
)
