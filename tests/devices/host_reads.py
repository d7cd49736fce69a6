"""A device without a machine: networks on `meta`, and a count of what the host would have to wait for.

On `meta` a tensor has a shape and no values, and an operation that mixes it with a CPU tensor raises, as on any
accelerator. What the host reads of such a tensor (an `item`, a branch, a mask turned into indices, a copy to the CPU)
stops it until the device has caught up. `HostReads` counts these and answers with made-up values of the right shape.
It counts too what the host sends in a way that waits until the device takes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
META = torch.device("meta")


class HostReads(TorchDispatchMode):
    """Counts where the host waits for a meta tensor; every number that is read is `value`."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.value = value
        self.seen: list[str] = []

    @property
    def count(self) -> int:
        return len(self.seen)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        far = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.is_meta]
        if far:
            if func is aten._local_scalar_dense.default:
                return self._read(func, _number(args[0].dtype, self.value))
            if func is aten.nonzero.default:  # all positions, as if every one were true
                size = args[0].numel()
                return self._read(func, torch.empty(size, args[0].dim(), dtype=torch.long, device=META))
            if func in (aten.equal.default, aten.is_nonzero.default):
                return self._read(func, True)
            if func is aten.index.Tensor and any(_is_mask(each) for each in args[1]):
                return self._read(func, func(args[0], [_indices(each) for each in args[1]], **kwargs))
            if func in (aten.index_put.default, aten.index_put_.default) and any(_is_mask(each) for each in args[1]):
                return self._read(func, args[0])
            if func is aten.masked_select.default:
                return self._read(func, args[0].flatten())
            if func is aten._to_copy.default and _kind(kwargs.get("device")) == "cpu":
                return self._read(
                    func, torch.full(args[0].shape, self.value, dtype=kwargs.get("dtype") or args[0].dtype)
                )
            if func is aten.copy_.default and not args[0].is_meta:
                return self._read(func, args[0].fill_(self.value))
            if func is aten.copy_.default and not args[1].is_meta and not (kwargs.get("non_blocking") or any(args[2:])):
                self.seen.append(f"{func} from the host")
        elif func is aten._to_copy.default and _kind(kwargs.get("device")) == "meta" and not kwargs.get("non_blocking"):
            self.seen.append(f"{func} from the host")
        return func(*args, **kwargs)

    def _read(self, func: Any, answer: Any) -> Any:
        self.seen.append(str(func))
        return answer


def _kind(device: Any) -> str | None:
    return None if device is None else torch.device(device).type


def _number(dtype: torch.dtype, value: float) -> Any:
    return False if dtype == torch.bool else value if dtype.is_floating_point else int(value)


def _is_mask(index: Tensor | None) -> bool:
    """A mask on the device; one on the CPU is turned into indices there, and the device need not be asked."""
    return index is not None and index.dtype == torch.bool and index.is_meta


def _indices(index: Tensor | None) -> Any:
    return tuple(torch.zeros(index.numel(), dtype=torch.long, device=META)) if _is_mask(index) else index


class WithoutFloat64(HostReads):
    """A device that has no float64, as Apple's: an operation that makes one raises."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)
        for each in tree_leaves(found):
            assert not (isinstance(each, Tensor) and each.is_meta and each.dtype == torch.float64), func
        return found
