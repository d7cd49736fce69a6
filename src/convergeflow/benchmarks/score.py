"""How fast a scorer reads: tokens per second with the default library's float32 products, and with the faster one's.

`quick_products` (`device.py`) takes another library where that is faster and as exact. On other processors both cases
are the same, and their ratio says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from convergeflow.benchmarks import measure
from convergeflow.device import quick_products
from convergeflow.errors import UserError
from convergeflow.evaluation.scorers import CausalScorer, scorer_named

LENGTH = 64


def run(scorer: str = "smollm2", batch: int = 8, repeats: int = 3) -> dict[str, Any]:
    """Medians of passes over `batch` rows of random tokens, the two in turn."""
    found = scorer_named(scorer, device="cpu")
    if not isinstance(found, CausalScorer):
        raise UserError(f"{scorer} makes no network calls: take smollm2, a folder or a model of the hub")
    ids = torch.randint(int(found.model.config.vocab_size), (batch, LENGTH), generator=torch.Generator().manual_seed(0))

    def read(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[], Any]:
        @torch.no_grad()
        def once() -> Any:
            with context():
                return found.model(input_ids=ids, use_cache=False).logits

        return once

    cases = {"default": read(contextlib.nullcontext), "quick": read(lambda: quick_products(ids.device))}
    times = measure.alternate(cases, repeats)
    gap = (cases["default"]() - cases["quick"]()).abs().max()
    return {
        "processor_quick_over_default": times.processor["default"] / times.processor["quick"],
        "tokens_per_processor_second": {name: ids.numel() / spent for name, spent in times.processor.items()},
        "largest_difference_of_a_logit": float(gap),
        "seconds": times.wall,
        "scorer": scorer,
        "rows": batch,
        "length": LENGTH,
        "repeats": repeats,
        "machine": measure.machine(),
    }
