"""Keys of foreign launchers and trainers, with the key of cloudtrain to write instead."""

from __future__ import annotations

import functools
import re

from ..backend_table import names as backend_names
from ..backend_table import traits

# A key of cloudtrain: the foreign names of the same setting.
_CALLED = """
resources.instances: num_nodes nodes nnodes instance_count num_instances num_machines machines replicas
        replica_count node_count numNodes InstanceCount
resources.min_instances: min_nodes min_replicas
resources.instance_type: machine_type vm_size ec2_instance_type InstanceType machineType
resources.spot: use_spot use_spot_instances spot_policy preemptible low_priority job_tier EnableManagedSpotTraining
resources.disk_gb: disk_size volume_size volume_size_in_gb boot_disk_size_gb disk storage
distributed.nproc_per_node: nproc num_proc ntasks_per_node procs_per_node num_processes_per_node
        process_count_per_instance numProcPerNode
distributed.max_restarts: max_restarts_on_errors restarts
distributed.timeout_s: ddp_timeout nccl_timeout rdzv_timeout
env: envs environment env_vars environment_variables Environment
secrets: secret secret_env
image: docker docker_image container container_image image_uri image_id imageUri TrainingImage
code.dir: source_dir code_dir project_dir root_dir
code.exclude: ignore excludes
name: job_name experiment_name display_name
tags: labels
init_from: pretrained pretrained_model initial_weights warm_start base_model from_pretrained
inputs: input data datasets channels input_data file_mounts
outputs: output output_uri output_path
requirements: pip dependencies packages pip_packages pip_requirements requirements_file requirements_txt
setup: setup_commands setup_script init_commands pre_run before_script
keep: persist preserve
progress.metrics: metric_definitions
on_stop: on_sigterm on_preempt on_preemption
checkpoint.uri: checkpoint_dir checkpoint_path checkpoint_s3_uri checkpoint_uri ckpt_dir save_dir
checkpoint.every_steps: save_steps save_every checkpoint_every save_interval
checkpoint.keep: save_total_limit keep_last keep_latest_k max_to_keep
checkpoint.resume: resume_from_checkpoint resume_from auto_resume autoresume
limits.max_duration: max_run max_runtime max_time time_limit walltime max_run_time timeout_minutes
limits.max_wait: wait_timeout max_wait_time max_pending
budget.limit: max_cost max_spend cost_limit max_budget
budget.on_limit: on_exceed on_exceeded
budget.alert_at: alerts thresholds alert_thresholds budget.alert budget.notify budget.warn_at
project: project_name budget_project cost_center billing_project
project.ledger: budget_uri budget_store ledger_uri
notify: notifications alert webhooks
capacity.try: any_of ordered fallback fallbacks failover regions zones instance_types machine_types
        instance_preferences InstancePreferences
capacity.limits.until: retry.duration
retry.max_attempts: max_retries retries attempts retry_count
retry.on: on_events
params: hyperparameters hparams hyperparams config model_config
training.parallel.tensor: tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size tp
training.parallel.pipeline: pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size pp_size pp
training.parallel.schedule: pipeline_parallel_schedule pipeline_schedule pp_schedule
training.parallel.chunks: virtual_pipeline_model_parallel_size num_virtual_stages
training.shard: zero_stage zero_optimization sharding_strategy
training.activation_offload: offload_activations activation_cpu_offload
training.max_steps: steps num_steps total_steps train_steps max_iters
training.epochs: num_epochs num_train_epochs max_epochs
training.micro_batch_size: per_device_train_batch_size micro_batch train_micro_batch_size_per_gpu
        per_device_batch_size local_batch_size
training.global_batch_size: train_batch_size total_batch_size effective_batch_size
training.optimizer.lr: learning_rate base_lr
training.optimizer.name: optim optimizer_name
training.schedule.warmup_steps: warmup num_warmup_steps
training.schedule.name: lr_scheduler scheduler lr_scheduler_type lr_schedule
training.clip_norm: max_grad_norm grad_clip gradient_clip_val clip_grad_norm gradient_clipping
training.log_every: logging_steps log_interval log_every_n_steps
training.eval_every: eval_steps eval_interval val_check_interval
training.num_workers: dataloader_num_workers data_workers loader_workers
training.precision: dtype mixed_precision amp
"""

# Foreign names without a single equivalent in cloudtrain: the advice.
_SAID = """
gpus num_gpus gpus_per_node gpu accelerator accelerator_type accelerator_count gpu_type slots_per_trial:
        say type and count per instance, `resources.accelerators: A100:8`, or name a `resources.instance_type`
entrypoint entry_point script_path main program:
        write `script: train.py` or `module: pkg.train`, or `task: task.py` for the shared trainer
run command commands cmd:
        torchrun is started: write `script: train.py` (or `module`, `task`), and `args`; commands before it: `setup`
conda conda_env environment_yml:
        write `requirements: requirements.txt`; on your own machines also `ssh.environment: conda` and `ssh.conda`,
        or `slurm.python: ~/miniconda3/envs/NAME/bin/python`
workdir work_dir working_dir working_directory cwd:
        write `code.dir` for the folder to ship, `distributed.workdir` for the one of its folders in which the ranks
        start; `ssh.workdir` is for files on the hosts
artifacts output_dir outputs_dir:
        write `keep: [out/]` for files in the working directory; `outputs` copies CLOUDTRAIN_OUTPUT_DIR elsewhere
batch_size: write `training.global_batch_size` (all ranks together) or `training.micro_batch_size` (one rank)
gradient_accumulation_steps accumulation_steps grad_accum accumulate_grad_batches:
        it follows from `training.global_batch_size` / (`training.micro_batch_size` x ranks)
fp16: write `training.precision: fp16`
bf16: write `training.precision: bf16`
num_processes world_size nprocs: the total follows from `resources.instances` x `distributed.nproc_per_node`
timeout deadline:
        write `limits.max_duration` (the job), `limits.max_wait` (machines) or `distributed.timeout_s` (a hung call)
max_price max_hourly_cost price_cap: the whole job is capped, not the hour: `budget.limit: 150 USD`
autostop idle_minutes idle_timeout: nothing idles: machines live as long as the job. `limits.max_duration` caps it
cloud provider platform target scheduler_name infra: write `backend: sagemaker` (or local, ssh, slurm, azureml, vertex)
region zone location: it belongs to the backend: `sagemaker.region`, `azureml.region`, `vertex.location`
cpus memory mem vcpus cpu: they come with the machine: name a `resources.instance_type`
fsdp ddp deepspeed fsdp_config distributed_type: write `training.strategy: fsdp` (or ddp)
sweep.place: a sweep is one job, whose machines train the trials side by side: leave `place` out
profiles extends defaults include: one file says it all; `--set key=value` changes a value for one call
"""


def entries(table: str) -> dict[str, str]:
    """Return the text behind each colon by the text before it. An indented line continues the line above."""
    lines = re.sub(r"\n +", " ", table.strip()).splitlines()
    return {before: behind.strip() for before, _, behind in (line.partition(":") for line in lines)}


@functools.cache
def our_keys() -> dict[str, str]:
    """Return a mapping from each foreign name to the key of cloudtrain."""
    names = {name: ours for ours, theirs in entries(_CALLED).items() for name in theirs.split()}
    for backend in backend_names():
        for key, theirs in traits(backend).foreign_keys.items():
            names |= dict.fromkeys(theirs.split(), f"{backend}.{key}")
    return names


_ADVICE = {name: advice for names, advice in entries(_SAID).items() for name in names.split()}

# Foreign names of `task`, `script` and `module`: a config with such a key does name a program to run.
RUNNABLE = frozenset(name for name, advice in _ADVICE.items() if "`script: train.py`" in advice)


def advice(name: str, section: str = "") -> str:
    """Return the advice for a key of a foreign tool, first for a key of this section; empty text if unknown."""
    if section and (said := advice(f"{section}.{name}")):
        return said
    return f"it is `{our_keys()[name]}` here" if name in our_keys() else _ADVICE.get(name, "")


def sibling(section: str, name: str) -> str:
    """Return the key that a backend's section uses in place of a sibling section's key; empty text if unknown."""
    named = traits(section).siblings.items()
    return next((own for own, theirs in named if name in theirs.split()), "")
