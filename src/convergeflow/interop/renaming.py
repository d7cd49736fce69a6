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
from convergeflow.systems.protocol import listing, misfits

ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Form:
    """A form of storage that is not ours: how to read it, and how ours looks in it."""

    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor], Tensor]


TRANSPOSED = Form(lambda tensor: tensor.T, lambda tensor: tensor.T)
"""(in, out) for (out, in)."""
COLUMN = Form(lambda tensor: tensor[:, 0], lambda tensor: tensor[:, None])
ROW = Form(lambda tensor: tensor[0], lambda tensor: tensor[None])


@dataclass(frozen=True)
class Renaming:
    """Their names -> names in a model's state, and the `forms` of those that are stored in another one."""

    names: Mapping[str, str]
    forms: Mapping[str, Form] = field(default_factory=dict)
    rotary: str | None = None
    """A buffer of theirs with the rotary frequencies, which are computed here; they must be those of base 10000."""

    def check(self, weights: Mapping[str, Tensor], model: nn.Module, source: str) -> None:
        """Refuse weights that are not exactly the expected ones, with the names of those that differ."""
        state = model.state_dict()
        expected = {theirs: state[ours] for theirs, ours in self.names.items()}
        expected |= {name: form.write(expected[name]) for name, form in self.forms.items()}
        if self.rotary is not None:
            expected[self.rotary] = weights.get(self.rotary, torch.empty(0))
        wrong = misfits(expected, weights)
        broken = [name for name, tensor in weights.items() if name in expected and not _finite(tensor)]
        if broken:
            wrong = "; ".join(filter(None, [wrong, listing("not finite numbers", broken)]))
        if wrong:
            raise UserError(f"{source} is not this network: {wrong}")
        if self.rotary is not None:
            self._check_rotary(weights[self.rotary], source)

    def _check_rotary(self, stored: Tensor, source: str) -> None:
        # We compute these frequencies; another base would silently turn every attention pattern.
        half = max(1, stored.numel())
        ours = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
        digits = max(1e-4, torch.finfo(stored.dtype).eps)  # a file in half precision rounds them too
        if stored.dim() != 1 or not torch.allclose(stored.double(), ours, rtol=digits):
            raise UserError(f"{source}: {self.rotary} does not hold the rotary frequencies of base 10000")

    def take_over(self, weights: Mapping[str, Tensor], model: nn.Module) -> None:
        """Put checked weights into the model, in float32."""
        read = {
            name: self.forms[name].read(weights[name]) if name in self.forms else weights[name] for name in self.names
        }
        taken = {self.names[name]: tensor.float() for name, tensor in read.items()}
        model.load_state_dict({**model.state_dict(), **taken}, strict=True)


def _finite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(torch.isfinite(tensor.float()).all())


def fill(model: nn.Module, renaming: Renaming, found: Found, which: str) -> None:
    """Check both sets of weights, then take one of them over."""
    if found.raw is not None:
        renaming.check(found.raw, model, found.place)
    weights = found.weights(which)
    renaming.check(weights, model, f"{found.place} ({which})")
    renaming.take_over(weights, model)


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
    """How many layers the names count; `pattern` has their number as its group. There are no more than names."""
    names = list(weights)
    numbers = [int(found[1][:9]) for name in names if (found := re.match(pattern, name))]
    return min(1 + max(numbers, default=-1), len(names))
