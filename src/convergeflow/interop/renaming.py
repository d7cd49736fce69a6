"""Strict renaming: every tensor of a file goes to one place in a model, and nothing is left on either side."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from convergeflow.errors import UserError
from convergeflow.interop.layouts import Found

Change = Callable[[Tensor], Tensor]
ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Renaming:
    """Their names -> names in a model's state; `changes` turn or cut a tensor that is stored in another form."""

    names: Mapping[str, str]
    changes: Mapping[str, Change] = field(default_factory=dict)
    rotary: str | None = None
    """A buffer of theirs with the rotary frequencies, which are computed here; they must be those of base 10000."""

    def check(self, weights: Mapping[str, Tensor], model: nn.Module, source: str) -> None:
        """Refuse weights that are not exactly the expected ones, with the names of those that differ."""
        own = model.state_dict()
        expected = {*self.names, *([self.rotary] if self.rotary else [])}
        wrong, broken = [], []
        for name in sorted(expected & set(weights)):
            tensor = weights[name]
            if not tensor.is_floating_point() or not bool(torch.isfinite(tensor.float()).all()):
                broken.append(name)
            if name in self.names and not self._fits(name, tensor, own[self.names[name]]):
                wrong.append(f"{name} is {tuple(tensor.shape)}, not {self._theirs(name, own[self.names[name]])}")
        complaints = [
            _listing("missing", sorted(expected - set(weights))),
            _listing("unexpected", sorted(set(weights) - expected)),
            _listing("mis-shaped", wrong),
            _listing("not finite numbers", broken),
        ]
        if any(complaints):
            raise UserError(f"{source} is not this network: " + "; ".join(filter(None, complaints)))
        if self.rotary:
            self._check_rotary(weights[self.rotary], source)

    def _changed(self, name: str, tensor: Tensor) -> Tensor:
        return self.changes[name](tensor) if name in self.changes else tensor

    def _fits(self, name: str, tensor: Tensor, own: Tensor) -> bool:
        try:
            return self._changed(name, tensor).shape == own.shape
        except (RuntimeError, IndexError):  # a transposition or a cut of a tensor with too few dimensions
            return False

    def _theirs(self, name: str, own: Tensor) -> tuple[int, ...]:
        shape = tuple(own.shape)
        return shape[::-1] if self.changes.get(name) is transposed else shape

    def _check_rotary(self, stored: Tensor, source: str) -> None:
        # We compute these frequencies; another base would silently turn every attention pattern.
        half = max(1, stored.numel())
        ours = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
        if stored.dim() != 1 or not torch.allclose(stored.double(), ours, rtol=1e-4):
            raise UserError(f"{source}: {self.rotary} does not hold the rotary frequencies of base 10000")

    def take_over(self, weights: Mapping[str, Tensor], model: nn.Module) -> None:
        """Put checked weights into the model, in float32."""
        taken = {ours: self._changed(theirs, weights[theirs]).float() for theirs, ours in self.names.items()}
        model.load_state_dict({**model.state_dict(), **taken}, strict=True)


def fill(model: nn.Module, renaming: Renaming, found: Found, which: str) -> None:
    """Check both sets of weights, then take one of them over."""
    if found.raw is not None:
        renaming.check(found.raw, model, found.place)
    weights = found.weights(which)
    renaming.check(weights, model, f"{found.place} ({which})")
    renaming.take_over(weights, model)


def transposed(tensor: Tensor) -> Tensor:
    """(in, out) as (out, in)."""
    if tensor.dim() != 2:
        raise IndexError("only matrices can be transposed")
    return tensor.T


def agreed(sizes: Iterable[int], what: str, source: str) -> int:
    """What most tensors say a size is: one that disagrees is then found by name."""
    found = Counter(int(size) for size in sizes).most_common(1)
    if not found:
        raise UserError(f"{source} is not this network: no tensor tells its {what}")
    return found[0][0]


def extents(weights: Mapping[str, Tensor], places: Iterable[tuple[str, int]]) -> list[int]:
    """The extents of those tensors that are there, by (name, dimension)."""
    return [
        weights[name].shape[dim] for name, dim in places if name in weights and weights[name].dim() > max(dim, -dim - 1)
    ]


def depth_of(weights: Iterable[str], pattern: str) -> int:
    """How many layers the names count; `pattern` has their number as its group."""
    numbers = [int(found[1]) for name in weights if (found := re.match(pattern, name))]
    return 1 + max(numbers, default=-1)


def _listing(kind: str, names: list[str], most: int = 8) -> str:
    if not names:
        return ""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{kind}: {', '.join(names[:most])}{more}"
