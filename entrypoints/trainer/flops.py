"""The arithmetic of a step, and its share of the device's peak: model FLOPs utilisation (MFU).

A multiply-add is two operations. Matrix products, convolutions and attention are counted; the rest is small.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

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
    words = device_name.replace("-", " ").split()
    if "MIG" in words or precision not in _FORMATS:
        return None
    for wanted, peaks in PEAKS:
        if all(word in words for word in wanted):
            return peaks[_FORMATS.index(precision)]
    return None


def device_peak_tflops(device: torch.device, precision: str) -> float | None:
    """Return the peak of this device; None for CPUs, and for GPUs outside the table: set training.peak_tflops.

    fp32 means tf32 if torch.set_float32_matmul_precision allows tf32. A convolution uses tf32 by default, so that
    convolutional models in fp32 may show too high a share, even over 100 %.
    """
    if device.type != "cuda":
        return None
    if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        name = torch.cuda.get_device_name(device)
        return peak_tflops(name, "tf32") or peak_tflops(name, "fp32")
    return peak_tflops(torch.cuda.get_device_name(device), precision)


def mfu(flops_per_step: float, step_s: float, ranks: int, peak_tflops: float) -> float:
    """Return the share of the devices' peak that the model's arithmetic reaches, 0 to 1.

    `flops_per_step` is over all ranks, forward and backward, without the recomputation of activation checkpointing;
    `peak_tflops` is of one rank's device. Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """
    return flops_per_step / (step_s * ranks * peak_tflops * 1e12)


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
        self._formulas: dict[Any, Callable[..., int]] = {**flop_counter.flop_registry, **_CPU_ATTENTION}
        self._count = 0
        self._failed = self._is_idle = False

    def __enter__(self) -> FlopCounter:
        """Start the count."""
        self._is_idle = _is_compiled()
        if not self._is_idle:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop the count."""
        if not self._is_idle:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    @property
    def total(self) -> int | None:
        """Floating-point operations so far; None if all operations were unknown, or a formula failed."""
        return None if self._failed else self._count or None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run and count the operation."""
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
    return any(callable(backend) for backend in backends.values())


def _cpu_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    count: int = flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
    return count


def _cpu_attention_backward(grad_out: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    shapes = grad_out.shape, query.shape, key.shape, value.shape
    count: int = flop_counter.sdpa_backward_flop_count(*shapes)  # type: ignore[no-untyped-call]
    return count


# torch 2.13 has formulas for attention's CUDA kernels only.
_CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}
