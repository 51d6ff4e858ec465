"""Likely causes of failures, by error texts that torch 2.13, Python 3.11 and this launcher have printed.

The texts of CUDA, NCCL and the driver come from their sources, because no GPU was available to print them.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from cloudtrain.launcher.jobs.causes import CAUSES, likely

GPU_FULL = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 5.12 GiB"
CPU_FULL = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 400000000000000 bytes. Error code 12 (Cannot allocate memory)"
)
KILLED = "killed by SIGKILL; meanwhile the kernel killed a process of this machine for want of memory"
NO_GIT = (
    "the requirements could not be installed: ERROR: Error [Errno 2] No such file or directory: 'git' while executing "
    "command git version | ERROR: Cannot find command 'git' - do you have 'git' installed and in your PATH?"
)
NO_PROGRAM = "node 0: setup command 1 of 1 ended with code 127: uv sync: /usr/bin/bash: line 1: uv: command not found"
SHM = "unable to allocate shared memory(shm) for file </torch_20391_1992539922_0>: No space left on device (28)"
NCCL = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, "
    "NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
)
UNEQUAL = "terminate called after throwing an instance of 'gloo::EnforceNotMet'"
GLOO = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation"
ARGPARSE = "exited with code 2; last line: train.py: error: unrecognized arguments: --resume"
ARGPARSE_PATH = "exited with code 2; last line: train.py: error: argument --resume: expected one argument"
CLICK = "exited with code 2; last line: Error: No such option: --resume"
SPAWNED = (
    "\n\n-- Process 0 terminated with the following error:\nTraceback (most recent call last):\n"
    '  File "torch/distributed/distributed_c10d.py", line 1892, in init_process_group\n'
    "    store, rank, world_size = next(rendezvous_iterator)\n"
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    "port: 12355, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n"
)
INTERFACE = (
    "[enforce fail at gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eth9; in two starts"
)
REDUCTION = "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates"
TWICE = "Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of"
FREED = "setStorage: sizes [8, 16], strides [1, 8], storage offset 0, and itemsize 4 requiring a storage size of 512 \
are out of bounds for storage of size 0"
NO_GRAD = "element 0 of tensors does not require grad and does not have a grad_fn"
SPARSE = "Could not run 'aten::linalg_vector_norm' with arguments from the 'SparseCPU' backend. This could be because"
NAN = "loss is nan at step 12, learning rate 0.1; no checkpoint was written; look at the data of this step, a lower lr"

TEXTS = [
    ("OutOfMemoryError", GPU_FULL, "the GPU's memory is full"),
    ("RuntimeError", CPU_FULL, "the machine's memory is full"),
    ("MemoryError", "", "the machine's memory is full"),
    (None, NO_PROGRAM, "the machine has no program `uv`"),
    (None, "CapacityError: Unable to provision requested ML compute capacity.", "no such machines are free there"),
    (None, "AllocationFailed: there is no sufficient capacity", "no such machines are free there"),
    (None, "no spot machines within limits.max_wait", "no such machines are free there"),
    (None, NO_GIT, "pip needs the program `git`"),
    (None, KILLED, "the machine's memory is full"),
    ("RuntimeError", SHM, "shared memory (/dev/shm) is too small"),
    ("OSError", "[Errno 28] No space left on device", "a disk is full"),
    ("RuntimeError", "iostream error; the disk of /mnt/checkpoints is full: 3 MB free", "a disk is full"),
    ("KeyError", "'SM_CHANNEL_TRAIN'", "only the jobs of another platform have SM_CHANNEL_TRAIN, or `inputs` lacks"),
    ("ModuleNotFoundError", "No module named 'strtok'", "no module `strtok`; name its package in `requirements`"),
    (
        None,
        "the requirements could not be installed: ModuleNotFoundError: No module named 'wheel'; a",
        "--no-build-iso",
    ),
    ("FileNotFoundError", "[Errno 2] No such file or directory: 'data/train.bin'", "`data/train.bin` was not sent"),
    ("ProcessRaisedException", SPAWNED, "starts ranks by mp.spawn"),
    ("RuntimeError", INTERFACE, "no network interface `eth9`, which"),
    ("OSError", "[Errno 98] Address already in use", "has the port"),
    (
        "UsageError",
        "No API key configured. Use `wandb login` to log in.",
        "set `secrets: [WANDB_API_KEY]`, which takes",
    ),
    ("DistBackendError", NCCL, "in a collective"),
    ("RuntimeError", GLOO, "in a collective"),
    (None, UNEQUAL, "needs equal batches"),
    ("RuntimeError", "CUDA driver version is insufficient for CUDA runtime version", "NVIDIA driver is older"),
    ("RuntimeError", "CUDA error: no kernel image is available for execution on the device", "not built for"),
    ("RuntimeError", "CUDA error: device-side assert triggered", "out of range"),
    ("NonFiniteError", NAN, "diverges"),
    *((None, text, "does not accept one of its arguments") for text in (ARGPARSE, ARGPARSE_PATH, CLICK)),
    ("RuntimeError", REDUCTION, "take no part in the loss"),
    ("RuntimeError", TWICE, "write use_reentrant=False"),
    ("RuntimeError", FREED, "a second derivative"),
    ("RuntimeError", NO_GRAD, "inside `with torch.enable_grad():`"),
    ("NotImplementedError", SPARSE, "with sparse=False"),
    ("RuntimeError", "Adam does not support sparse gradients, please consider SparseAdam instead", "sparse=False"),
]


@pytest.mark.parametrize(("kind", "message", "wanted"), TEXTS)
def test_cause_is_found_in_the_error_text(kind: str | None, message: str, wanted: str) -> None:
    """The cause is a sentence with the meaning and the fix."""
    told = likely({"rank": 0, "kind": "exception", "type": kind, "message": message}, {})
    assert wanted in told
    assert "; " in told
    assert "{" not in told.replace("env: {CUDA_LAUNCH_BLOCKING: 1}", "").replace("env: {WANDB_MODE: offline}", "")


def test_every_cause_has_a_text() -> None:
    """Each row of the table is tested."""
    for cause in CAUSES:
        assert any(re.search(cause.pattern, f"{kind}: {message}", re.IGNORECASE) for kind, message, _ in TEXTS), (
            cause.means
        )


@pytest.mark.parametrize(
    "error",
    [
        None,
        {"rank": 1, "type": "ValueError", "message": "label 11 is not below 10"},
        {"rank": 1, "type": "FileNotFoundError", "message": "[Errno 2] No such file or directory: '/mnt/data/x'"},
        {"rank": 1, "kind": "exit", "message": "exited with code 3", "lines": ["all shards loaded"]},
    ],
)
def test_no_cause_is_given_without_proof(error: dict[str, Any] | None) -> None:
    """An absolute path may be anything, and the meaning of a user's exit code is unknown."""
    assert likely(error, {}) is None


def test_cause_is_searched_in_lines_and_names_keys_of_our_trainer() -> None:
    """A library that prints the reason leaves only an exit code; a script has no micro_batch_size."""
    error = {"rank": 0, "kind": "exit", "message": "exited with code 1", "lines": ["step 3", GPU_FULL]}
    assert "GPU's memory" in str(likely(error, {}))
    error = {"type": "OutOfMemoryError", "message": GPU_FULL}
    assert "training.micro_batch_size" in str(likely(error, {"task": "task.py"}))
    assert "training." not in str(likely(error, {"task": None, "script": "train.py"}))


def test_cause_names_the_disk_key_only_if_the_key_has_an_effect() -> None:
    """On the user's own machines `resources.disk_gb` has no effect."""
    error = {"type": "OSError", "message": "[Errno 28] No space left on device"}
    for backend, is_key in (("local", False), ("ssh", False), ("sagemaker", True)):
        assert ("resources.disk_gb" in str(likely(error, {"backend": backend}))) is is_key


def test_sigkill_without_proof_is_not_called_memory() -> None:
    """A manual `kill -9` looks the same; only the kernel's counter proves a lack of memory."""
    told = str(likely({"rank": 0, "kind": "signal", "signal": "SIGKILL", "message": "killed by SIGKILL"}, {}))
    assert told.startswith("something killed it from outside")
