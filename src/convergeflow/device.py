"""Which device and which number formats to use: the only file that names an accelerator.

| | CPU | CPU, training with `precision=bf16` | CUDA | MPS |
|---|---|---|---|---|
| trunk | float32 | bfloat16 autocast | bfloat16 autocast | float32 |
| base logits <h, W_j> | float32 | bfloat16 operands allowed, float32 sums | bfloat16 operands, float32 sums | float32 |
| kernel <x, e_j> | float32 | bfloat16 operands allowed, float32 sums | float32 accuracy on tensor cores | float32 |
| mean E^T w | float32 | bfloat16 operands allowed, float32 sums | bfloat16 operands, float32 sums | float32 |
| state | float64 | - | float64 | float32: the device has no float64 |

`precision_of` is this table, and everything reads it; a CUDA device without bfloat16 takes the CPU's first column. The
second one is for the steps of training alone, on CPUs with instructions for bfloat16 (`reduced_products`): elsewhere
bfloat16 is slower than float32.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from convergeflow.errors import UserError, unknown_name

NAMES = ("auto", "cpu", "cuda", "mps")
WITHOUT_FLOAT64 = ("mps",)
READS_LATE = ("mps",)
"""A copy that is not waited for reads the host's memory after the call, when it may be gone."""


@dataclass(frozen=True)
class Precision:
    """A column of the table: formats of operands; sums are float32 or better."""

    trunk: torch.dtype
    base: torch.dtype
    kernel: torch.dtype
    mean: torch.dtype
    state: torch.dtype
    rounded: torch.dtype | None = None
    """What the kernel term is rounded to before it joins the other logits; None where it is not rounded."""

    @property
    def autocast(self) -> torch.dtype | None:
        """What the trunk runs under; None if it runs in its own format."""
        return self.trunk if self.trunk.itemsize < 4 else None

    def described(self) -> dict[str, str]:
        """For records."""
        formats = {name: dtype for name, dtype in asdict(self).items() if dtype is not None}
        return {name: str(dtype).removeprefix("torch.") for name, dtype in formats.items()}


FULL = Precision(torch.float32, torch.float32, torch.float32, torch.float32, torch.float64)
DOUBLE = Precision(*(torch.float64,) * 5)
HALF = Precision(torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16, torch.float64)
SINGLE = Precision(*(torch.float32,) * 5)
REDUCED = Precision(*(torch.bfloat16,) * 4, torch.float64)
PRECISIONS = {"float32": FULL, "float64": DOUBLE}
"""What a user can choose in place of the device's own column."""
PUBLISHED = "published"
"""The device's own column, with the kernel term rounded to bfloat16 as the paper's code rounds it."""

_chosen: list[str] = []
_reduced: list[bool] = []


def precision_of(device: torch.device, table: torch.dtype = torch.float32) -> Precision:
    """The formats on a device; a float64 table is computed in float64 throughout."""
    if table == torch.float64:
        return DOUBLE
    if _chosen and _chosen[-1] != PUBLISHED:
        return PRECISIONS[_chosen[-1]] if device.type not in WITHOUT_FLOAT64 else SINGLE
    half = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    own = SINGLE if device.type in WITHOUT_FLOAT64 else HALF if half else REDUCED if reduces(device) else FULL
    return replace(own, rounded=torch.bfloat16) if _chosen else own


def too_short(dtype: torch.dtype) -> UserError:
    """Why weights are never held in half precision."""
    name = str(dtype).removeprefix("torch.")
    return UserError(
        f"weights in {name} would lose the digits that the kernel needs: they stay float32, or float64 if asked; where "
        "bfloat16 pays, on CUDA, parts of a pass use it by themselves"
    )


def dtype_named(dtype: torch.dtype | str | None) -> torch.dtype:
    """The format of a model's weights that a user asks for: float32 or float64."""
    if dtype is None:
        return torch.float32
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise unknown_name("dtype", str(dtype), PRECISIONS)
    if found.itemsize < 4:
        raise too_short(found)
    return found


@contextmanager
def chosen_precision(name: str | None) -> Iterator[None]:
    """float32 or float64 throughout, or as published, for a while; None leaves the device its own formats."""
    if name is not None and name not in (*PRECISIONS, PUBLISHED):
        raise unknown_name("precision", name, (*PRECISIONS, PUBLISHED))
    _chosen.extend([] if name is None else [name])
    try:
        yield
    finally:
        if name is not None:
            _chosen.pop()


def trunk_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """What the trunk runs in on a device: its format of the table."""
    dtype = precision_of(device).autocast
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


@lru_cache
def bfloat16_pays(device: torch.device) -> bool:
    """Whether products of bfloat16 are faster than float32's there; a CPU needs instructions for them."""
    if device.type != "cpu":
        return True
    tell = getattr(torch.cpu, "get_capabilities", None)  # older versions answer for x86 alone
    found = {"avx512_bf16": torch.cpu._is_avx512_bf16_supported()} if tell is None else tell()
    has = any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return has and bool(torch.backends.mkldnn.is_available())


@lru_cache
def _quick() -> bool:
    """Whether oneDNN's float32 products are faster than the default library's on this CPU, and as exact.

    The default one, MKL, uses half of an AMD core. oneDNN gets float32 products only with leave to round the operands
    to bfloat16, of which some CPUs make use: those keep the default.
    """
    if torch.cuda.is_available() or not hasattr(torch.cpu, "get_capabilities"):  # the switch is CUDA's as well
        return False
    name = str(torch.cpu.get_capabilities().get("cpu_name"))
    if "AMD" not in name or not bfloat16_pays(torch.device("cpu")):
        return False
    with _products("medium"):
        return not _rounds()


def _rounds() -> bool:
    """Whether operands of float32 products lose digits now."""
    near_one = torch.full((256, 256), 1 + 2.0**-12)
    return bool((torch.mm(near_one, near_one) < 256 * (1 + 2.0**-12)).any())


@contextmanager
def _products(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def quick_products(device: torch.device) -> AbstractContextManager[Any]:
    """For float32 passes of a large network on a CPU: by the faster library; the last bits of sums may differ.

    Networks of the size that is trained on a CPU gain nothing: their time goes elsewhere.
    """
    return _products("medium") if device.type == "cpu" and _quick() else nullcontext()


@contextmanager
def reduced_products(device: torch.device, wanted: bool = True) -> Iterator[None]:
    """For a step of training, forward and backward: products of float32 may be made of bfloat16 ones, the kernel's too.

    It hands them to oneDNN, which may round the operands and need not. On Zen 5 it does not: its float32 products are
    2.5 times as fast as the default library's and as exact. Where it rounds, a logit of width d moves by about
    2^-9 (|h||W_j| + kernel |x||e_j|) / sqrt(d) nats: 0.01 where the kernel decides at width 128. Nothing happens where
    a CPU has no instructions for bfloat16, and on other devices, whose own column has it where it does no harm.
    """
    if not (wanted and device.type == "cpu" and bfloat16_pays(device)):
        yield
        return
    _reduced.append(True)
    try:
        with _products("medium"):
            yield
    finally:
        _reduced.pop()


def reduces(device: torch.device) -> bool:
    """Whether `reduced_products` holds there now."""
    return bool(_reduced) and device.type == "cpu"


def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention; `attn_mask` is true where a query sees a key.

    The library's, but written out for training in bfloat16 on a CPU: its backward pass is six times slower there.
    """
    if not (q.is_cpu and q.dtype == torch.bfloat16 and torch.is_grad_enabled()):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return (scores if attn_mask is None else scores.masked_fill(~attn_mask, -1e9)).softmax(-1).to(v.dtype) @ v


@dataclass(frozen=True)
class Placement:
    """A device, and the format of autocast on it in training, if any."""

    device: torch.device
    autocast: torch.dtype | None


def choose_device(name: str = "auto", precision: str = "auto") -> Placement:
    """The device by name, or the fastest one present; with the format of a run's `precision`, auto, fp32 or bf16."""
    name = str(name)  # a `torch.device` is as good as its name
    if name not in NAMES:
        raise UserError(f"unknown device {name!r} (known: {', '.join(NAMES)})")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device 'cuda' is not available in this PyTorch; use `device` cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("device 'mps' is not available on this machine; use `device` cpu")
    device = torch.device(name)
    own = precision_of(device).autocast
    return Placement(device, own if precision == "auto" else torch.bfloat16 if precision == "bf16" else None)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """In memory that a copy to the device need not wait for, if the device has such."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def state_dtype_of(device: torch.device) -> torch.dtype:
    """The most precise format for the sampler's state on a device."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def widest(tensor: Tensor) -> Tensor:
    """In the most precise format of its device."""
    return tensor.to(state_dtype_of(tensor.device))


def onto(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on a device, float64 in the most precise format there; the host does not wait."""
    dtype = state_dtype_of(device) if tensor.dtype == torch.float64 else tensor.dtype
    return tensor.to(device, dtype, non_blocking=tensor.is_cpu and device.type not in READS_LATE)


def matching(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor of the host's where another one is and in its format; the host does not wait."""
    return onto(tensor, like.device).to(like)


def visible_to(rank: int) -> dict[str, str]:
    """What the environment of process `rank` must say, so that processes share the accelerators evenly."""
    count = torch.cuda.device_count()
    return {} if count < 2 else {"CUDA_VISIBLE_DEVICES": str(rank % count)}


@dataclass(frozen=True)
class Memory:
    """Of a device, in bytes."""

    total: int
    free: int

    @property
    def spare(self) -> int:
        """What one part of the work may take beside the rest: an eighth of the device, at most half of what is free.

        The first bound comes first on purpose: where memory is plenty, what is kept depends on the device alone, and
        two runs round alike.
        """
        return min(self.total // 8, self.free // 2)


UNKNOWN_MEMORY = Memory(8 << 30, 4 << 30)
"""Where the device does not tell."""


def memory_of(device: torch.device) -> Memory:
    """How much memory a device has, and how much of it can still be had."""
    if device.type != "cuda":
        return UNKNOWN_MEMORY
    free, total = torch.cuda.mem_get_info(device)
    # What the allocator holds and nobody uses can be had as well.
    return Memory(total, free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def compiles(device: torch.device) -> bool:
    """Whether compiling the trunk pays there: it takes Triton, which Windows lacks and which wants Volta or newer."""
    return device.type == "cuda" and has_triton() and torch.cuda.get_device_capability(device) >= (7, 0)


@cache
def has_triton() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("triton") is not None


TRITON_BACKEND = "cuda"


def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels, and the library's products with float32 sums, run there: on NVIDIA's GPUs."""
    return device.type == TRITON_BACKEND and torch.version.hip is None


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def wait_for(device: torch.device) -> None:
    """Until the device has done what was asked of it: clocks are read after this."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def peak_bytes(device: torch.device, *, reset: bool = False) -> int | None:
    """The most memory that tensors have taken on a device since the last reset; None where it is not counted."""
    if device.type != "cuda":
        return None
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.max_memory_allocated(device))


def name_of(device: torch.device) -> str:
    """What the device calls itself."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type
