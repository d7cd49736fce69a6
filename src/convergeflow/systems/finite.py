"""No number that is not one becomes a word: weights are looked at when they are loaded, states when they are read.

A state that overflowed gives tokens like any other, since the largest of nothing but NaN is the first. One look at the
end of a batch is enough to see that; only then is the batch made again, watched, to say where it happened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from convergeflow.errors import ConvergeFlowError, UserError


class _Found(Exception):
    pass


def check_weights(weights: Mapping[str, Tensor], source: object) -> None:
    """Refuse weights that are not finite, by name."""
    wrong = [name for name, value in weights.items() if value.is_floating_point() and not _finite(value)]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UserError(f"{source}: {wrong[0]}{more} holds values that are not finite: copy or train it again")


def check_end(end: Any, seeds: Sequence[int], again: Callable[..., Any] | None = None) -> None:
    """Refuse samples whose last state or prediction is not finite.

    `again` makes the batch again, observed, to say at which step it happened; a server has no time for that.
    """
    rows = _finite_rows(end.x) & _finite_rows(end.final.mu)
    fine = rows.tolist()  # the one read from the device
    if all(fine):
        return
    where = "at the end"

    def watch(step: Any) -> None:
        nonlocal where
        if not (_finite(step.x_t) and _finite(step.mu)):
            where = f"at step {step.index + 1} of {step.num_steps}"
            raise _Found

    if again is not None:
        with contextlib.suppress(_Found):
            again(observe=watch)
    bad = [seed for seed, good in zip(seeds, fine, strict=True) if not good]
    raise ConvergeFlowError(
        f"the sample of seed {bad[0]} is not finite {where} ({len(bad)} of the {len(seeds)} in its batch): lower "
        "the guidance (`scg`, `ug`), raise the temperature, or look at the weights"
    )


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


def _finite_rows(value: Tensor) -> Tensor:
    return torch.isfinite(value).flatten(1).all(1)
