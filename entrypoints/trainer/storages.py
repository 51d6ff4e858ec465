"""The bytes of tensors' storages, with torch's inner names: for memory.py, which answers if a name is missing."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import TaskError


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
        for value in tree_leaves(result):
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
        with FakeTensorMode(), counter:
            tensor = torch.empty(256, dtype=torch.float32)
            made_bytes = counter.live_bytes
            tensor.untyped_storage().resize_(0)
            resized_bytes = counter.live_bytes
    except Exception as error:
        raise TaskError(f"torch {torch.__version__} differs inside: {type(error).__name__}: {error}") from error
    if (made_bytes, resized_bytes) != (1024, 0):
        raise TaskError(f"torch {torch.__version__} differs inside: a tensor of 1024 bytes counts as {made_bytes}")
