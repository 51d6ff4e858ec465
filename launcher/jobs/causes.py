"""Likely causes of a failure, with a remedy, from known error texts of torch, NCCL and the operating system.

A cause is shown only if the failure's own text proves the cause, and always as likely. The texts in the tests were
printed by real runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..backend_table import traits


@dataclass(frozen=True)
class Cause:
    """A pattern in a failure's text, the meaning, and the remedy.

    `{name}` in the texts is a group of the pattern. `of_task` replaces `do` for a job with cloudtrain's trainer, which
    has the named keys; `of_sized_disk` replaces the remedy on backends with `resources.disk_gb`. The pattern is
    compiled only for a failure: most screens show no failure.
    """

    pattern: str
    means: str
    do: str
    of_task: str = ""
    of_sized_disk: str = ""


# The first match counts, so the more certain causes come first.
CAUSES = (
    Cause(
        r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|HIP out of memory",
        "the GPU's memory is full",
        "try a smaller batch",
        "try a smaller training.micro_batch_size, the steps stay the same; or training.activation_checkpointing: true, "
        "precision: bf16, strategy: fsdp",
    ),
    Cause(
        r"for want of memory|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory|\bMemoryError\b",
        "the machine's memory is full",
        "try fewer data loader workers, or a machine with more memory",
        "try a smaller training.num_workers or micro_batch_size, or a machine with more memory",
    ),
    Cause(
        r"unable to (?:open|allocate) shared memory|insufficient shared memory|Bus error.*shared memory",
        "the container's shared memory (/dev/shm) is too small for the data loader's workers",
        "use fewer workers, or give the container more",
        "set training.num_workers: 0, or give the container more",
    ),
    Cause(
        r"Unable to provision requested ML compute capacity|\bAllocationFailed\b|machines within limits\.max_wait",
        "no such machines are free there",
        "take fewer or other machines, another region or a longer limits.max_wait, name several places under "
        "capacity.try, or try again later",
    ),
    Cause(
        r"No space left on device|Disk quota exceeded|Errno 28|the disk of \S+ is full",
        "a disk is full",
        "free space there, or lower checkpoint.keep",
        of_sized_disk="raise resources.disk_gb, or lower checkpoint.keep",
    ),
    Cause(
        r"requirements could not be installed: .*No module named '(?P<module>[^']+)'",
        "the build of a package imports `{module}`, which is not there while pip builds",
        "in `setup`, install `{module}` and then the package by `pip install --no-build-isolation`",
    ),
    Cause(
        r"setup command \d+ of .*: (?P<program>[\w.+-]+): (?:command )?not found",
        "the machine has no program `{program}`",
        "install it in an earlier command of `setup`, as `pip install {program}` if PyPI has it, or in the image",
    ),
    Cause(
        r"Cannot find command '(?P<program>[\w.+-]+)'",
        "pip needs the program `{program}`, which the machine does not have",
        "install it in the image or on the machine, or ship the package with the code",
    ),
    Cause(
        r"No module named '(?P<module>[^']+)'",
        "the job's Python has no module `{module}`",
        "name its package in `requirements`, or install it in the image or environment; if it is your own, see that "
        "code.dir holds it, that no ignore file names it, and that env.PYTHONPATH names a folder such as src",
    ),
    Cause(
        r"KeyError: '(?P<name>(?:SM|AIP|AZUREML|AZURE_ML)_\w+)'",
        "only the jobs of another platform have {name}, or `inputs` lacks the entry",
        "`plan` names cloudtrain's own variable for the script, or the missing entry",
    ),
    Cause(
        r"No such file or directory: '(?P<path>(?!/)[^']+)'",
        "`{path}` was not sent with the code",
        "see that code.dir holds it and that no ignore file names it; data comes by `inputs`",
    ),
    Cause(
        r"error: unrecognized arguments: |error: argument \S+: (?:expected|invalid) |Error: No such option|"
        r"Option '\S+' (?:requires an argument|does not take a value)",
        "the script does not accept one of its arguments",
        "correct `args`, or `resume_args`, which follow after a checkpoint (a path is $CLOUDTRAIN_RESUME_PATH); then "
        "add --update-config to resume",
    ),
    Cause(
        r"No API key configured|api_key not configured",
        "the job has no API key of Weights & Biases",
        "set `secrets: [WANDB_API_KEY]`, which takes the value from your environment; or "
        "`env: {{WANDB_MODE: offline}}`, with `wandb/` in `keep`",
    ),
    Cause(
        r"Process \d+ terminated with the following error:[\s\S]*in init_process_group",
        "the script starts ranks by mp.spawn, beside the ranks that cloudtrain has started",
        "call the spawned function once, with LOCAL_RANK, and leave MASTER_ADDR and MASTER_PORT as they are",
    ),
    Cause(
        r"Unable to find address for: (?P<name>[^\s;]+)",
        "a machine has no network interface `{name}`, which GLOO_SOCKET_IFNAME names",
        "name one that all machines have (`ip -br addr`), or leave the variable out",
    ),
    Cause(
        r"Address already in use|EADDRINUSE",
        "another program, or a job that is being ended, has the port",
        "submit or resume it once more; a script must not choose ports of its own",
    ),
    Cause(
        r"gloo::EnforceNotMet|Received data size doesn't match expected size",
        "the ranks exchanged tensors of different size",
        "a collective in loss or evaluate needs equal batches: the last batch of an evaluation may be smaller; under "
        "fsdp all ranks must call the same blocks: multiply the output of a layer skipped at random by 0 or 1",
    ),
    Cause(
        r"collective operation timeout|Timed out waiting \d+ms for (?:recv|send)",
        "a rank waited in vain for the others in a collective: one was stuck, or took another path through the code",
        "look at what the other ranks did last; distributed.timeout_s is how long they wait",
    ),
    Cause(
        r"CUDA driver version is insufficient|driver on your system is too old",
        "the machine's NVIDIA driver is older than what this torch was built for",
        "use an image or a torch for an older CUDA, or a machine with a newer driver",
    ),
    Cause(
        r"no kernel image is available for execution",
        "this torch was not built for the machine's GPU",
        "use a torch build that names its architecture, or another machine",
    ),
    Cause(
        r"device-side assert triggered",
        "an index on the GPU is out of range: a label beyond the classes, a token beyond the vocabulary",
        "run it with env: {{CUDA_LAUNCH_BLOCKING: 1}}, or on the CPU, to see the very line",
    ),
    Cause(
        r"NonFiniteError",
        "the training diverges",
        "lower the learning rate, or clip the gradient",
        "lower training.optimizer.lr, set training.clip_norm: 1.0, or on_nan: skip, which leaves out single steps",
    ),
    Cause(
        r"Expected to have finished reduction in the prior iteration",
        "some parameters take no part in the loss, and DDP waits for their gradients",
        "use all of them in forward, freeze the others with requires_grad_(False), or multiply the output of a layer "
        "that is skipped at random by 0 or 1",
    ),
    Cause(
        r"Expected to mark a variable ready only once",
        "a parameter gets two gradients in a backward pass, as by a reentrant checkpoint of a layer that is used twice",
        "write use_reentrant=False in torch.utils.checkpoint",
    ),
    Cause(
        r"setStorage: .* out of bounds for storage of size 0",
        "fsdp has freed weights that the backward pass needs again, as for a second derivative",
        "use DistributedDataParallel for a loss with create_graph=True",
        "set strategy: ddp, with shard: optimizer for less memory, for a loss with create_graph=True",
    ),
    Cause(
        r"element 0 of tensors does not require grad",
        "a gradient is asked for where none is recorded, as under torch.no_grad()",
        "compute it inside `with torch.enable_grad():`",
        "an evaluation runs under torch.no_grad(): compute it inside `with torch.enable_grad():`",
    ),
    Cause(
        r"(?:not support|takes no) sparse gradients|from the 'Sparse\w+' backend|add\(sparse, dense\)",
        "a layer makes sparse gradients, which its optimizer or another step of the training cannot take",
        "create the layer with sparse=False",
    ),
)


def likely(error: Mapping[str, Any] | None, config: Mapping[str, Any]) -> str | None:
    """Return the likely cause of the failure and a remedy, in a sentence; None if the text proves no cause."""
    if not error:
        return None
    # The message is searched first: earlier lines may report errors from which the job recovered.
    spoken = f"{error.get('type') or ''}: {error.get('message') or ''}"
    for text in (spoken, "\n".join(error.get("lines") or ())):
        for cause in CAUSES:
            if found := re.search(cause.pattern, text, re.IGNORECASE):
                do = cause.of_task if config.get("task") and cause.of_task else cause.do
                if cause.of_sized_disk and traits(str(config.get("backend"))).sizes_disks:
                    do = cause.of_sized_disk
                return f"{cause.means}; {do}".format(**found.groupdict())
    if error.get("signal") == "SIGKILL":
        return "something killed it from outside; where the machine's memory was full, its kernel log says so (dmesg)"
    return None
