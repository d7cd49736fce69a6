"""Token rules by hand."""

from __future__ import annotations

import pytest
import torch

from convergeflow.errors import UserError
from convergeflow.flow.schedule import Gumbel, Linear
from convergeflow.model.embedding import normalise_rows
from convergeflow.model.fused import Weighted
from convergeflow.sampling.decoding import decode

TABLE = normalise_rows(torch.randn(20, 64, generator=torch.Generator().manual_seed(0)))


def test_each_rule_reads_what_it_says() -> None:
    mu = TABLE[[3, 4]][None] * 0.9
    final = Weighted(mu, torch.zeros(1, 2), token=torch.tensor([[7, 8]]), top_weight=torch.ones(1, 2))
    x = torch.zeros(1, 2, 64, dtype=torch.float64)
    now, end = Linear()(torch.tensor([0.9])), Linear()(torch.tensor([1.0]))
    decoded = decode(final, x, now, end, TABLE)
    assert decoded.by("weight").tolist() == [[7, 8]]
    assert decoded.by("prediction").tolist() == [[3, 4]]
    assert decoded.by("distance").tolist() == [[3, 4]], "the closing update ends at mu"
    assert decoded.agreements() == {"weight=prediction": 0.0, "weight=distance": 0.0, "prediction=distance": 1.0}


def test_the_last_state_is_too_noisy_to_read_but_the_closed_one_is_not() -> None:
    schedule, generator = Gumbel(4.723 - 2.485, 0.852), torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 20, (400, 1), generator=generator)
    now = schedule(torch.full((400,), 1 - 0.5 / 16, dtype=torch.float64))
    noise = torch.randn(400, 1, 64, generator=generator, dtype=torch.float64)
    x_star = TABLE[tokens].double()
    x = now.alpha[:, None, None] * x_star + now.sigma[:, None, None] * noise * 1.7
    final = Weighted(x_star, torch.zeros(400, 1), token=tokens)
    end = schedule(torch.ones(400, dtype=torch.float64))
    closed = (decode(final, x, now, end, TABLE).by("distance") == tokens).double().mean()
    raw = ((x @ TABLE.double().T).argmax(-1) == tokens).double().mean()
    assert float(raw) < 0.85 and float(closed) > 0.97, (float(raw), float(closed))


def test_the_direct_predictor_has_no_weights_to_read() -> None:
    x = torch.zeros(1, 2, 64, dtype=torch.float64)
    at = Linear()(torch.tensor([0.9]))
    decoded = decode(Weighted(TABLE[[1, 2]][None], torch.zeros(1, 2)), x, at, Linear()(torch.tensor([1.0])), TABLE)
    with pytest.raises(UserError, match="no token weights"):
        decoded.by("weight")
    with pytest.raises(UserError, match="unknown token rule"):
        decoded.by("nearest")
