"""Training speed, the parts of a step's time, and the time left; as numbers that people read at a glance.

The arithmetic of a step is counted too, and its share of the device's peak: model FLOPs utilisation (MFU). A
multiply-add is two operations. Matrix products, convolutions and attention are counted; the rest is small.
"""

from __future__ import annotations

import contextlib
import math
import resource
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..errors import TaskError
from ..format import quantity
from .strategies.strategy import StageTimes

Batch = TypeVar("Batch")
_CPU = torch.device("cpu")
_SLOW_DATA = 0.1  # of the step: above this share, a log line reports waiting for data


@dataclass(frozen=True)
class Speed:
    """Means over one window of optimizer steps, from one log line to the next; None is an unknown value.

    The job's first step is left out, unless alone in the window: the first step compiles, and starts the data workers.
    step_s = data_s + compute_s + communication_s; a checkpoint's time is extra. Times are from rank 0's clock, rates
    cover all ranks. compute_s is the remainder, so the figure is right on a GPU too, where calls return before the work
    is done: forward, backward, the optimizer, and the waiting for other ranks outside communication_s.
    """

    step_s: float
    data_s: float  # the loop waited for a batch; on a GPU, which may still have had work, the maximum idle time
    compute_s: float
    communication_s: float | None  # a sampled step's wait for gradients after its computation: ddp_communication
    checkpoint_s: float  # training paused for saving; per step, the window's saves spread over its steps
    samples_per_s: float
    tokens_per_s: float | None
    mfu: float | None  # the share of the devices' peak that the model's arithmetic reaches, 0 to 1
    bubble: float | None  # the share of a step in which the stages of a pipeline wait for each other, their mean
    bubble_expected: float | None  # by the schedule and, for `cut: timed`, the measured times of the blocks
    staleness: float | None  # updates between a forward and its backward pass, the mean of rank 0's: schedule async
    memory_bytes: int  # peak of rank 0 so far: GPU memory of tensors, or the process's memory without a GPU
    figures: dict[str, Any]  # of the strategy, such as bytes_sent: what rank 0 sends in a step

    def fields(self) -> dict[str, Any]:
        """Return the known values by name: the step event's fields."""
        known = {name: value for name, value in vars(self).items() if value is not None and name != "figures"}
        return known | self.figures

    def text(self) -> str:
        """Return the rates in words, `8.1k samples/s 16.6M tokens/s mfu 41%`, with the wait for data if large."""
        parts = [f"{quantity(self.samples_per_s)} samples/s"]
        if self.tokens_per_s is not None:
            parts.append(f"{quantity(self.tokens_per_s)} tokens/s")
        if self.mfu is not None:
            parts.append(f"mfu {100 * self.mfu:.2g}%")
        if self.bubble is not None:
            parts.append(f"bubble {100 * self.bubble:.0f}% (expected {100 * (self.bubble_expected or 0.0):.0f}%)")
        if self.staleness:
            parts.append(f"staleness {self.staleness:.2g}")
        if self.data_s > _SLOW_DATA * self.step_s:
            parts.append(f"waiting {100 * self.data_s / self.step_s:.0f}% for data")
        return " ".join(parts)


@dataclass(eq=False)
class ThroughputMeter:
    """Counts optimizer steps between log lines. Saving and evaluating do not count as stepping.

    A step costs one clock reading and two for each micro-batch, about a microsecond; the rest is done at log lines.
    """

    samples_per_step: int  # over all ranks
    tokens_per_sample: int | None = None
    ranks: int = 1
    peak_tflops: float | None = None  # of one rank; None: MFU stays unknown
    communication: Callable[[], float | None] | None = None  # returns seconds a step
    stage_times: Callable[[], StageTimes] | None = None  # a pipeline's since the last call; all ranks measure together
    figures: Callable[[], dict[str, Any]] = dict  # a strategy's, since the last call
    device: torch.device = _CPU
    step_s: float = field(default=0.0, init=False)  # of the last window; 0 until the first window ends
    # Over all ranks, forward and backward, without the recomputation of checkpointing; 0 if the count failed.
    flops_per_step: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._since_s = time.perf_counter()
        self._steps = self._all_steps = 0
        self._first_s = self._first_data_s = 0.0  # of the first step, which compiles, and starts data workers
        self._data_s = self._checkpoint_s = self._paused_s = 0.0
        self._looked_s, self._peak_bytes = -math.inf, 0

    def wait_for(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch, and count the wait."""
        begin_s = time.perf_counter()
        batch = next(batches)
        self._data_s += time.perf_counter() - begin_s
        return batch

    def restart(self) -> None:
        """Begin the first window now: earlier work, such as loading a checkpoint, was no step."""
        self._since_s = time.perf_counter()

    def tick(self) -> None:
        """Count one optimizer step."""
        self._steps += 1
        if self.step_s == 0.0:  # a first figure at once: the deadline's margin needs a figure before the first log line
            self.step_s = self._first_s = time.perf_counter() - self._since_s
            self._first_data_s = self._data_s
            if self.stage_times is not None:
                self.stage_times()  # left out, like the first step

    def skip(self, seconds: float) -> None:
        """Leave out time for work other than steps, such as evaluating."""
        self._since_s += seconds
        self._paused_s += seconds

    def add_checkpoint(self, seconds: float) -> None:
        """Leave out time in which training paused for a checkpoint, and report the pause."""
        self._checkpoint_s += seconds
        self.skip(seconds)

    def measure(self) -> Speed:
        """Return the window's means and begin a new one. About 50 us, so not for every step of a tiny model."""
        now_s, steps = time.perf_counter(), max(self._steps, 1)
        checkpoint_s = self._checkpoint_s / steps
        passed_s, data_s = now_s - self._since_s, self._data_s
        if self._first_s and steps > 1:  # no mean includes the first step, so that the time left is right at once
            steps, passed_s, data_s = steps - 1, passed_s - self._first_s, data_s - self._first_data_s
        self._first_s = 0.0
        stages = self.stage_times() if self.stage_times is not None else None
        if passed_s > 0.0:
            self.step_s = passed_s / steps
        data_s = min(data_s / steps, self.step_s)
        communication_s = None if self.communication is None else self.communication()
        if communication_s is not None:  # a sample of one step may exceed the mean
            communication_s = min(communication_s, self.step_s - data_s)
        if now_s - self._looked_s > 1.0:  # without a GPU the read of the kernel's file takes 150 us
            self._looked_s, self._peak_bytes = now_s, peak_memory(self.device)
        figures = self.figures()
        self._all_steps += self._steps
        self._since_s, self._steps, self._data_s, self._checkpoint_s = now_s, 0, 0.0, 0.0
        rate = self.samples_per_step / self.step_s
        utilisation = None
        if self.flops_per_step and self.peak_tflops is not None:  # by Chowdhery et al. 2022 (PaLM), appendix B
            utilisation = self.flops_per_step / (self.step_s * self.ranks * self.peak_tflops * 1e12)
        return Speed(
            step_s=self.step_s,
            data_s=data_s,
            compute_s=self.step_s - data_s - (communication_s or 0.0),
            communication_s=communication_s,
            checkpoint_s=checkpoint_s,
            samples_per_s=rate,
            tokens_per_s=rate * self.tokens_per_sample if self.tokens_per_sample else None,
            mfu=utilisation,
            bubble=None if stages is None else statistics.mean(stages.waited_s) / (steps * self.step_s),
            bubble_expected=None if stages is None else stages.expected,
            staleness=None if stages is None or not stages.most_staleness else stages.mean_staleness,
            memory_bytes=self._peak_bytes,
            figures=figures,
        )

    def eta_s(self, steps_left: int) -> float:
        """Return the seconds for the remaining steps at the last window's pace, with pauses as frequent as so far."""
        return steps_left * (self.step_s + self._paused_s / max(self._all_steps + self._steps, 1))


def ddp_communication(model: Any, every: int) -> Callable[[], float | None]:
    """Return a function for the seconds that the newest sampled step waited for gradients beyond computing its own.

    From DistributedDataParallel's clocks, host clocks on CPU and CUDA events on a GPU: the time of its all-reduces less
    the overlap with the backward pass; including the wait for slower ranks. DDP samples the first 10 steps and then one
    of `every`. None without such a model (fsdp keeps no clocks), or if torch has changed its private names.
    """
    with contextlib.suppress(AttributeError):
        # One of log_every: reading the clocks waits for the GPU, so sampling every step would stop it running ahead.
        model._set_ddp_runtime_logging_sample_rate(every)

    def newest() -> float | None:
        try:
            found = model._get_ddp_logging_data()  # 6 us
            ns = float(found["backward_comm_time"] - found["backward_compute_comm_overlap_time"])
        except (AttributeError, KeyError):  # KeyError: before the second step
            return None
        return max(0.0, ns / 1e9)

    return newest


def peak_memory(device: torch.device) -> int:
    """Return the peak of bytes in use: GPU memory of tensors; without a GPU, main memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        # getrusage inherits its peak from the parent process: after a launcher of 500 MB, 500 MB.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# Peak dense TFLOPS by GPU: (fp32, tf32, fp16, bf16), accumulating in fp32; None if the GPU lacks the format. The first
# row whose words are all in torch.cuda.get_device_name() holds; boards with two form factors have two rows. From the
# named NVIDIA data sheets, which since Ampere also quote tensor cores with sparsity, at twice these figures. Checked in
# November 2026 against second-hand copies of the sheets, except T4 and A10G, which are from memory.
PEAKS: tuple[tuple[tuple[str, ...], tuple[float | None, ...]], ...] = (
    (("V100", "PCIE"), (14.0, None, 112.0, None)),  # Tesla V100 data sheet, January 2020
    (("V100",), (15.7, None, 125.0, None)),
    (("T4",), (8.1, None, 65.0, None)),  # T4 data sheet, March 2019
    (("A10G",), (35.0, 35.0, 70.0, 70.0)),  # A10G data sheet for AWS, 2021
    (("A10",), (31.2, 62.5, 125.0, 125.0)),  # A10 data sheet, March 2021
    (("A100",), (19.5, 156.0, 312.0, 312.0)),  # A100 data sheet, June 2021
    (("L40S",), (91.6, 183.0, 362.0, 362.0)),  # L40S data sheet, August 2023
    (("L4",), (30.3, 60.0, 121.0, 121.0)),  # L4 data sheet, March 2023
    (("H100", "PCIe"), (51.0, 378.0, 756.0, 756.0)),  # H100 data sheet, 2022
    (("H100", "NVL"), (60.0, 418.0, 835.0, 835.0)),  # H100 data sheet, 2024
    (("H100",), (67.0, 495.0, 989.0, 989.0)),
    (("H200", "NVL"), (60.0, 418.0, 835.0, 835.0)),  # H200 data sheet, November 2024
    (("H200",), (67.0, 495.0, 989.0, 989.0)),
    (("B200",), (75.0, 1125.0, 2250.0, 2250.0)),  # HGX B200 data sheet, 2025: the board's figures by 8
)
_FORMATS = ("fp32", "tf32", "fp16", "bf16")


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Return a GPU's peak dense TFLOPS at fp32, tf32, fp16 or bf16; None for a GPU outside the table.

    A slice of a GPU (MIG) is outside the table: its peak depends on the slice.
    """
    words = set(device_name.replace("-", " ").split())
    rows = (peaks for wanted, peaks in PEAKS if words.issuperset(wanted) and "MIG" not in words)
    return dict(zip(_FORMATS, next(rows, ()), strict=False)).get(precision)


def device_peak_tflops(device: torch.device, precision: str) -> float | None:
    """Return the peak of this device; None for CPUs, and for GPUs outside the table: set training.peak_tflops.

    fp32 means tf32 if torch.set_float32_matmul_precision allows tf32. A convolution uses tf32 by default, so that
    convolutional models in fp32 may show too high a share, even over 100 %.
    """
    if device.type != "cuda":
        return None
    name, is_tf32 = torch.cuda.get_device_name(device), torch.get_float32_matmul_precision() != "highest"
    peak = peak_tflops(name, "tf32") if precision == "fp32" and is_tf32 else None
    return peak or peak_tflops(name, precision)


class FlopCounter(TorchDispatchMode):
    """Counts the operations of this rank's work inside `with Counter() as counter`, afterwards in `counter.total`.

    Meant for one real micro-batch, forward and backward: results keep their bits. Recomputation by activation
    checkpointing is left out, and a custom or Triton kernel without a registered formula counts as zero. The cost is
    some microseconds per operation. With any compiled module the counter counts nothing, since torch 2.13 never again
    runs a compiled module in compiled form after a run under any dispatch mode.

    The formulas come from torch's FlopCounterMode. FlopCounterMode itself would count recomputation, put hooks on all
    modules, and let a failing formula end the forward pass.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._formulas: dict[Any, Callable[..., int]] = {**flop_registry, **_CPU_ATTENTION}
        self._count = 0
        self._failed = self._is_idle = False

    def __enter__(self) -> FlopCounter:
        self._is_idle = _is_compiled()
        if not self._is_idle:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._is_idle:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    @property
    def total(self) -> int | None:
        """Floating-point operations so far; None if all operations were unknown, or a formula failed."""
        return None if self._failed else self._count or None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = self._formulas.get(getattr(func, "_overloadpacket", func))
        # Inside the backward pass, only activation checkpointing's second forward has gradients enabled (a gradient of
        # a gradient has too: such a case is rare, and counted too low).
        if formula is None or (torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()):
            return out
        try:
            self._count += int(formula(*args, **kwargs, out_val=out))
        except Exception:  # a formula's error on odd shapes must not end training
            self._failed = True
        return out


def _is_compiled() -> bool:
    """Return whether torch.compile was called for any function, by the private list of its backends."""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return any(map(callable, backends.values()))


# torch 2.13 has formulas for attention's CUDA kernels only.
_CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention
    ],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ],
}


class StorageCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that operations inside the context make, and that still live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self._sizes: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]] = weakref.WeakKeyDictionary()
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Any:
        counter, resize = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:  # fsdp frees gathered parameters with it
            result = resize(storage, size)
            if storage in counter._sizes:
                cell = counter._sizes[storage]
                counter._add(size - cell[0])
                cell[0] = size
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in _pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.count(value)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage, once; the device meta stands for the host's memory, and does not count.

        A sparse tensor consists of two dense tensors, which are counted when they are made.
        """
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.device.type == "meta" or local.layout != torch.strided:
            return
        storage = local.untyped_storage()
        if storage not in self._sizes:
            cell = self._sizes[storage] = [storage.nbytes()]
            self._add(cell[0])
            weakref.finalize(storage, lambda: self._add(-cell[0]))

    def _add(self, size: int) -> None:
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def require_counts() -> None:
    """Raise TaskError if this version of torch makes or resizes storages in a way that the counter does not see."""
    counter = StorageCounter()
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(), counter:
            tensor = torch.empty(256, dtype=torch.float32)
            made_bytes = counter.live_bytes
            tensor.untyped_storage().resize_(0)
            resized_bytes = counter.live_bytes
    except Exception as error:
        raise TaskError(f"torch {torch.__version__} differs inside: {type(error).__name__}: {error}") from error
    if (made_bytes, resized_bytes) != (1024, 0):
        raise TaskError(f"torch {torch.__version__} differs inside: a tensor of 1024 bytes counts as {made_bytes}")
