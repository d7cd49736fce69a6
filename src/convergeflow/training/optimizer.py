"""AdamW for everything, or Muon for the trunk's matrices and AdamW for the rest; rules by kind of parameter.

| kind | which | weight decay | rate |
|---|---|---|---|
| matrix | 2-D weights of the trunk's layers but the (zero-initialised) modulation | yes | lr; Muon: matrix_lr |
| table | the token table | no | table_lr |
| schedule | the noise schedule's own parameters | no | schedule_lr |
| other | heads, gains, biases, time and condition inputs | 2-D ones | lr |

Muon (Jordan et al. 2024) replaces the momentum of a matrix by the nearest orthogonal one, found by Newton-Schulz steps.
They run in fp32 here: bf16, the usual choice, is a hundred times slower on CPUs without bf16 units.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from convergeflow.errors import ConvergeFlowError
from convergeflow.training.config import OptimizerConfig, StageConfig
from convergeflow.training.sharding import assign, like, local, whole

MUON_RATIO = 20.0
"""Muon's rate relative to AdamW's where the stage does not give one."""


def kind_of(name: str, parameter: Tensor) -> str:
    """Which row of the table above a parameter belongs to."""
    words = name.split(".")
    if any(word.endswith("schedule") for word in words):
        return "schedule"
    if words[-2:] == ["embedding", "weight"]:
        return "table"
    inside_block = any(word.isdigit() for word in words)
    modulation = any("modulation" in word for word in words)
    return "matrix" if inside_block and parameter.ndim == 2 and not modulation else "other"


def orthogonalise(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Drive all singular values of a matrix towards 1 (to about [0.7, 1.2]) by quintic Newton-Schulz steps in fp32."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.float()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; the update of an [m, n] matrix is scaled by sqrt(max(1, m/n))."""

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1.0 - group["momentum"])
                direction = parameter.grad.lerp(state["momentum"], group["momentum"])
                # A shard has no singular values of its own: the full matrix is gathered, each process keeps its part.
                full = direction.full_tensor() if isinstance(direction, DTensor) else direction
                update = like(orthogonalise(full).to(parameter.dtype), parameter)
                scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)


def groups_of(
    named: Iterable[tuple[str, nn.Parameter]], stage: StageConfig, config: OptimizerConfig
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Parameter groups for AdamW and for Muon; each carries its names and its peak rate."""
    muon = config.name == "muon-fp32"
    rates = {
        "matrix": (stage.matrix_lr or MUON_RATIO * stage.lr) if muon else stage.lr,
        "table": stage.table_lr or stage.lr,
        "schedule": stage.schedule_lr or stage.lr,
        "other": stage.lr,
    }
    groups: dict[tuple[str, bool, bool], dict[str, Any]] = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        kind = kind_of(name, parameter)
        decays = kind in ("matrix", "other") and parameter.ndim >= 2
        # Sharded and whole tensors cannot share one fused update.
        key = (kind, decays, isinstance(parameter, DTensor))
        decay, rate = config.weight_decay if decays else 0.0, rates[kind]
        fresh = {"kind": kind, "params": [], "names": [], "peak": rate, "lr": rate, "weight_decay": decay}
        group = groups.setdefault(key, fresh)
        group["params"].append(parameter)
        group["names"].append(name)
    matrices = [group for group in groups.values() if muon and group["kind"] == "matrix"]
    return [group for group in groups.values() if group not in matrices], matrices


def _adamw(groups: list[dict[str, Any]], betas: tuple[float, float]) -> torch.optim.AdamW:
    try:
        return torch.optim.AdamW(groups, betas=betas, fused=True)
    except RuntimeError:  # this device has no fused kernel
        return torch.optim.AdamW(groups, betas=betas)


class StageOptimizer:
    """The optimizers of one stage behind one face; its state is named tensors, without pickle."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], stage: StageConfig, config: OptimizerConfig) -> None:
        adamw, muon = groups_of(named, stage, config)
        if not adamw and not muon:
            raise ConvergeFlowError(f"stage {stage.name!r} trains nothing: every parameter is frozen")
        self.stage = stage
        self.parts: list[torch.optim.Optimizer] = []
        if adamw:
            self.parts.append(_adamw(adamw, config.betas))
        if muon:
            self.parts.append(Muon(muon, momentum=config.momentum))

    def set_rate(self, share: float) -> float:
        """Set every group to a share of its peak rate; returns the base learning rate."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = group["peak"] * share
        return self.stage.lr * share

    def main_parameters(self) -> list[nn.Parameter]:
        """All but the noise schedule's: its fit is a loss of its own and must not use up the norm of clipping."""
        groups = [group for part in self.parts for group in part.param_groups if group["kind"] != "schedule"]
        return [parameter for group in groups for parameter in group["params"]]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def _named(self) -> Iterable[tuple[torch.optim.Optimizer, str, nn.Parameter]]:
        for part in self.parts:
            for group in part.param_groups:
                for name, parameter in zip(group["names"], group["params"], strict=True):
                    yield part, name, parameter

    def state(self) -> dict[str, Tensor]:
        """`parameter:key` -> full tensor; every process must call it."""
        return {
            f"{name}:{key}": whole(value)
            for part, name, parameter in self._named()
            for key, value in part.state[parameter].items()
        }

    def load(self, state: dict[str, Tensor], *, missing_ok: bool = False) -> None:
        """Put the tensors of `state` back; with `missing_ok` a parameter may start without moments."""
        for part, name, parameter in self._named():
            keys = ["momentum"] if isinstance(part, Muon) else ["step", "exp_avg", "exp_avg_sq"]
            if any(f"{name}:{key}" not in state for key in keys):
                if missing_ok:
                    continue
                raise ConvergeFlowError(f"the checkpoint has no optimizer state for {name!r}")
            for key in keys:
                value, own = state[f"{name}:{key}"], part.state[parameter]
                if key == "step":
                    # A fused update counts on the parameter's device, a plain one on the CPU.
                    where = local(parameter).device if part.defaults.get("fused") else torch.device("cpu")
                    own[key] = value.to(where, torch.float32, copy=True)
                else:
                    own[key] = torch.zeros_like(parameter, requires_grad=False)
                    assign(own[key], value)
