"""One model over several processes: the call that DDP and FSDP2 watch, and tensors whole or in shards.

FSDP2 is applied here directly (`fully_shard`): accelerate passes over it in silence on a CPU. Scalar parameters cannot
be sharded; they stay whole on every process and their gradients are averaged by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from convergeflow.errors import ConvergeFlowError
from convergeflow.objective.losses import Loss
from convergeflow.systems.protocol import misfits


class Doorway(nn.Module):
    """Calls any method of the model through `forward`, the only call whose parameters DDP and FSDP2 look after."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: str, *values: Any, **options: Any) -> Any:
        result = getattr(self.model, call)(*values, **options)
        if not isinstance(result, Loss):
            return result
        # A tuple and a dict of tensors, since the wrappers look for tensors in those and not in our records. Copies: a
        # part may be a view of gathered weights, whose memory FSDP2 takes away after the backward pass.
        as_scalar = partial(torch.as_tensor, dtype=torch.float32, device=result.total.device)
        return result.total, {name: as_scalar(value).detach().clone() for name, value in result.parts.items()}


def shard(doorway: Doorway, *, training: bool) -> Doorway:
    """Spread the parameters over all processes: each entry of a `ModuleList` is one unit, all else another.

    A training model keeps gathered weights until its backward pass. Self-conditioning makes an extra pass on some rows,
    which one process may have and another not; were weights gathered anew for each pass, they would wait for each other
    for ever. A model that is only evaluated lets go after each call, or its gathered copy would go stale.
    """
    mesh = init_device_mesh(next(doorway.parameters()).device.type, (dist.get_world_size(),))
    scalars = {parameter for parameter in doorway.parameters() if parameter.ndim == 0}
    for stack in [module for module in doorway.modules() if isinstance(module, nn.ModuleList)]:
        for block in stack:
            if any(parameter.ndim for parameter in block.parameters()):
                fully_shard(block, mesh=mesh, reshard_after_forward=not training, ignored_params=scalars)
    fully_shard(doorway, mesh=mesh, reshard_after_forward=not training, ignored_params=scalars)
    if training:
        # By default the backward pass gathers ahead in the order of the forward calls, again one that processes may not
        # share. Naming a unit itself switches that off: its weights are gathered already.
        for module in doorway.modules():
            if isinstance(module, FSDPModule):
                module.set_modules_to_backward_prefetch([module])
    return doorway


def gather_gradients(doorway: nn.Module, now: bool) -> None:
    """Whether the next backward pass of a sharded model ends with the exchange of gradients."""
    for module in doorway.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(now, recurse=False)


def average_scalar_gradients(doorway: nn.Module) -> None:
    """Average over processes the gradients of what a sharded model keeps whole."""
    for parameter in doorway.parameters():
        if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on the CPU; every process must call it."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


def like(full: Tensor, target: Tensor) -> Tensor:
    """A full tensor laid out as `target` is: its device, and its shards where it has any."""
    full = full.to(target.device)
    if isinstance(target, DTensor):
        return distribute_tensor(full, target.device_mesh, target.placements)
    return full


@torch.no_grad()
def assign(target: Tensor, full: Tensor) -> None:
    """Copy a full tensor into `target`, whole or sharded."""
    target.copy_(like(full, target))


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """All weights, whole and on the CPU; every process must call it."""
    return {name: whole(value) for name, value in model.state_dict().items()}


def load_state(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy full weights into a model, whole or sharded; names and shapes must agree."""
    own = model.state_dict()
    if wrong := misfits(own, weights):
        raise ConvergeFlowError(f"the checkpoint is of another model: {wrong}")
    for name, value in own.items():
        assign(value, weights[name])


@torch.no_grad()
def gradient_norm(parameters: Iterable[Tensor], clip: float | None = None) -> Tensor:
    """The norm of all gradients together; with `clip` they are scaled down to that norm where they exceed it."""
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not found:
        return torch.zeros(())
    kept = [torch.linalg.vector_norm(grad).square() for grad in found if not isinstance(grad, DTensor)]
    cut = [torch.linalg.vector_norm(local(grad)).square() for grad in found if isinstance(grad, DTensor)]
    total = torch.stack(kept).sum() if kept else torch.zeros((), device=found[0].device)
    if cut:
        shards = torch.stack(cut).sum()
        dist.all_reduce(shards)
        total = total + shards
    norm = total.sqrt()
    if clip is not None:
        scale = (clip / norm).clamp(max=1.0)
        for grad in found:
            local(grad).mul_(scale)
    return norm
