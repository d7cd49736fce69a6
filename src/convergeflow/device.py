"""Which device and which number formats to use: the only file that names an accelerator.

| device | network | sampler state | why |
|---|---|---|---|
| cuda | bfloat16 autocast | float64 | tensor cores; the state is tiny |
| mps  | float32 | float32 | the device has no float64 |
| cpu  | float32 | float64 | bfloat16 is slower than float32 on CPUs without bf16 units |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from convergeflow.errors import UserError

NAMES = ("auto", "cpu", "cuda", "mps")


@dataclass(frozen=True)
class Placement:
    """A device, and the format of autocast on it, if any."""

    device: torch.device
    autocast: torch.dtype | None


def choose_device(name: str = "auto") -> Placement:
    """The device by name, or the fastest one present."""
    if name not in NAMES:
        raise UserError(f"unknown device {name!r} (known: {', '.join(NAMES)})")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise UserError("device 'cuda' is not available in this PyTorch; use `device` cpu")
        return Placement(torch.device("cuda"), torch.bfloat16 if torch.cuda.is_bf16_supported() else None)
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("device 'mps' is not available on this machine; use `device` cpu")
    return Placement(torch.device(name), None)


def state_dtype_of(device: torch.device) -> torch.dtype:
    """The most precise format for the sampler's state on a device."""
    return torch.float32 if device.type == "mps" else torch.float64
