"""The site's configuration as text: slurm.conf, slurmdbd.conf, the fake GPUs, and the database's first content."""

from collections.abc import Mapping

NODE = {"CPUs": 4, "RealMemory": 8000, "Gres": "gpu:a100:4", "Feature": "fast"}
GPU_FILES = "/opt/gpus/gpu"  # with a number; device files, else Slurm sets no CUDA_VISIBLE_DEVICES
CLUSTER = "lab"
ACCOUNTS = f"""\
add cluster {CLUSTER}
add account lab,other cluster={CLUSTER}
add user alice,bob account=lab,other defaultaccount=lab
"""  # each command takes half a second
# Debian's defaults, except: times that a test can wait for (production: KillWait 30, SlurmdTimeout 300, MinJobAge 300),
# no cgroups, and root in place of the user slurm. The larger PriorityTier pre-empts; only jobs of `spot` can lose.
SETTINGS = {
    "ClusterName": CLUSTER,
    "SlurmctldHost": "controller",
    "SlurmUser": "root",
    "AuthType": "auth/munge",
    "StateSaveLocation": "/var/lib/slurm/slurmctld",
    "SlurmdSpoolDir": "/var/lib/slurm/slurmd",
    "SlurmctldPidFile": "/run/slurmctld.pid",
    "SlurmdPidFile": "/run/slurmd.pid",
    "SlurmctldLogFile": "/var/log/slurmctld.log",
    "SlurmdLogFile": "/var/log/slurmd.log",
    "SlurmdParameters": "config_overrides",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "MpiDefault": "none",
    "ReturnToService": "2",
    "SlurmdTimeout": "10",
    "MessageTimeout": "5",
    "KillWait": "2",
    "MinJobAge": "120",
    "GresTypes": "gpu",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core_Memory",
    "DefMemPerCPU": "1000",
    "SchedulerType": "sched/backfill",
    # The scheduler looks each second (defaults: 3 s after a submit, else 30 and 60 s).
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=1",
    "PriorityType": "priority/multifactor",
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "AccountingStorageHost": "controller",
    "AccountingStorageEnforce": "associations,limits,qos,safe",
    "AccountingStorageTRES": "gres/gpu",
    "AccountingStoreFlags": "job_comment,job_env,job_script",
    "DebugFlags": "NO_CONF_HASH",
}
PARTITIONS = {
    "main": {"Default": "YES", "MaxTime": "60", "DefaultTime": "10", "PriorityTier": "5", "PreemptMode": "OFF"},
    "spot": {"MaxTime": "60", "DefaultTime": "10", "PriorityTier": "1", "PreemptMode": "REQUEUE", "GraceTime": "4"},
    "short": {"MaxTime": "1", "MaxNodes": "1", "PriorityTier": "5", "PreemptMode": "OFF"},
}
SLURMDBD = """\
AuthType=auth/munge
DbdHost=controller
SlurmUser=root
PidFile=/run/slurmdbd.pid
LogFile=/var/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
"""


def conf_files(nodes: int, changes: Mapping[str, str]) -> dict[str, str]:
    """Return the files of /etc/slurm by name.

    `changes` are settings of slurm.conf, or of a partition as `PARTITION.Setting`: `{"spot.GraceTime": "0"}`.
    """
    settings, partitions = dict(SETTINGS), {name: dict(options) for name, options in PARTITIONS.items()}
    for name, value in changes.items():
        partition, _, setting = name.rpartition(".")
        (partitions[partition] if partition else settings)[setting] = value
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines.append(f"NodeName=node[0-{nodes - 1}] {_words(NODE)}")
    lines += [f"PartitionName={name} Nodes=ALL {_words(options)}" for name, options in partitions.items()]
    return {
        "slurm.conf": "\n".join(lines) + "\n",
        "slurmdbd.conf": SLURMDBD,
        "gres.conf": f"Name=gpu Type=a100 File={GPU_FILES}[0-3]\n",
        "cgroup.conf": "CgroupPlugin=cgroup/v1\n",  # slurmd reads the file even if no plugin uses cgroups
    }


def _words(options: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())
