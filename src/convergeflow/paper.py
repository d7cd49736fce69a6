"""ConvergeFlow on one page, in the paper's letters and with its equation numbers. Run it: python -m convergeflow.paper

A sequence of L tokens is a point of R^(L x d): each token j stands for its embedding e_j, a row of E of norm sqrt(d).
Time runs from t = 0, noise, to t = 1, data. The network sees time as gamma = log(sigma^2/alpha^2). It is a function
log_f(x, gamma, c) -> [B, L, V] of a state x [B, L, d], noise levels gamma [B] and an earlier prediction c [B, L, d],
where zeros stand for "no earlier prediction". Everything else is on this page.

Nothing here is fast, and nothing else in the package imports it. `tests/test_paper_page.py` holds it equal to the core.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

LogF = Callable[[Tensor, Tensor, Tensor], Tensor]


def gumbel(t: Tensor, loc: float = 4.723, scale: float = 0.852) -> Tensor:
    """The noise level gamma at time t: LangFlow's schedule, the quantiles of a Gumbel law, clamped at both ends."""
    q = (1 - t).clamp(1e-5, 1)  # the share of the schedule that is still to come
    return (loc - scale * torch.log(-torch.log(q))).clamp(max=loc - scale * math.log(1e-5))


def coefficients(gamma: Tensor) -> tuple[Tensor, Tensor]:
    """(alpha, sigma) with alpha^2 + sigma^2 = 1, in a shape that multiplies x [B, L, d]."""
    return torch.sigmoid(-gamma).sqrt()[:, None, None], torch.sigmoid(gamma).sqrt()[:, None, None]


def path(x_star: Tensor, z: Tensor, gamma: Tensor) -> Tensor:
    """Eq. 1: x_t = alpha_t x_star + sigma_t z."""
    alpha, sigma = coefficients(gamma)
    return alpha * x_star + sigma * z


def weights(log_f: LogF, E: Tensor, x: Tensor, gamma: Tensor, c: Tensor) -> Tensor:
    """Eq. 21: w(j) ~ f(j) exp(-|x - alpha e_j|^2 / (2 sigma^2)), for every position, [B, L, V].

    The rows of E have equal norms. So all of the kernel that depends on j is (alpha/sigma^2) <x, e_j>.
    """
    alpha, sigma = coefficients(gamma)
    return torch.softmax(log_f(x, gamma, c) + alpha / sigma**2 * (x @ E.T), dim=-1)


def predict(log_f: LogF, E: Tensor, x: Tensor, gamma: Tensor, c: Tensor) -> Tensor:
    """Eq. 22: mu = E^T w, a weighted mean of embeddings."""
    return weights(log_f, E, x, gamma, c) @ E


def loss(log_f: LogF, E: Tensor, s: Tensor, gamma: Tensor, z: Tensor, conditioned: Tensor) -> Tensor:
    """Eq. 17 for tokens s [B, L]; the rows `conditioned` [B] see the model's own first prediction (Eq. 12)."""
    alpha, sigma = coefficients(gamma)
    x_star = E[s]  # Eq. 16
    x = path(x_star, z, gamma)
    with torch.no_grad():
        c = conditioned[:, None, None] * predict(log_f, E, x, gamma, torch.zeros_like(x))
    mu = predict(log_f, E, x, gamma, c)
    return ((1 + alpha / sigma) ** 2 * (x_star - mu) ** 2).mean()


def adapted(strength: float, configuration: str, gammas: Tensor) -> Tensor:
    """Sections 4.3, 4.5: a strength at each grid point, constant (A) or growing towards the data (B, C)."""
    ratio = torch.exp(gammas / 2)  # sigma/alpha
    return strength / {"A": torch.ones_like(ratio), "B": 1 + ratio.sqrt(), "C": 1 + ratio}[configuration]


def refinements(K: int, configuration: str, gammas: Tensor) -> Tensor:
    """Section 4.3: K_i = ceil(adapted K). The sampler makes NFE = sum_i (K_i + 1) network calls."""
    return adapted(K, configuration, gammas).ceil().long()


def step(x: Tensor, mu: Tensor, now: Tensor, then: Tensor, w_ug: float = 0.0) -> Tensor:
    """From noise level `now` to `then`: Eq. 32, which is Eq. 11 with w_ug = 0, and then the same as Eqs. 10 and 26."""
    (alpha, sigma), (alpha_then, sigma_then) = coefficients(now), coefficients(then)
    epsilon = (x - alpha * mu) / sigma
    return alpha_then * (x / alpha + (1 + w_ug) * (sigma_then / alpha_then - sigma / alpha) * epsilon)


class Sample(NamedTuple):
    """Where trajectories end: x at every grid point, the weights of the last call [B, L, V], x after the last step."""

    states: list[Tensor]
    w: Tensor
    x: Tensor


@torch.no_grad()
def sample(
    log_f: LogF, E: Tensor, x: Tensor, gammas: Tensor, K: Tensor, w_scg: Tensor, w_ug: Tensor, previous: bool = False
) -> Sample:
    """Section 3.2 from noise x [B, L, d] through the noise levels `gammas` [N + 1]; the first N are grid points.

    At point i: predict, refine K_i times, step. The guided prediction p is the next condition. The last step follows
    the last call as it is, without guidance, and so do the tokens. With `previous` and K_i = 0 the condition at a point
    is the prediction of the point before (Eq. 29).
    """
    states, c, levels = [], torch.zeros_like(x), gammas[:, None].expand(-1, len(x))
    for i in range(len(gammas) - 1):
        states.append(x)
        w = weights(log_f, E, x, levels[i], c)
        u = p = w @ E
        for _ in range(int(K[i])):  # Eq. 31
            w = weights(log_f, E, x, levels[i], p)
            p = u + w_scg[i] * (w @ E - u)  # Eq. 30
        last = i == len(gammas) - 2
        x = step(x, w @ E if last else p, levels[i], levels[i + 1], 0.0 if last else float(w_ug[i]))
        c = p if previous else torch.zeros_like(x)
    return Sample(states, w, x)


def by_weight(end: Sample) -> Tensor:
    """Eq. 28: the token of the largest weight."""
    return end.w.argmax(-1)


def by_distance(end: Sample, E: Tensor) -> Tensor:
    """Eq. 27: the token of the nearest embedding; with equal norms that is the largest inner product."""
    return (end.x @ E.T).argmax(-1)


TEXT = "the cat saw a dog . a dog saw the cat . the dog ate a fish . a cat ate the fish . the fish fled a cat ."


def main(L: int = 6, d: int = 16) -> None:
    """Train on five sentences for some seconds, sample, and look where every position ends."""
    torch.manual_seed(0)
    words = sorted(set(TEXT.split()))
    data = torch.tensor([words.index(word) for word in TEXT.split()]).view(-1, L)
    E = nn.functional.normalize(torch.randn(len(words), d), dim=-1) * math.sqrt(d)
    loc = 4.723 - math.log(768 / d)  # narrower embeddings are unreadable under less noise
    sizes = [2 * L * d + 1, 256, 256, L * len(words)]
    network = nn.Sequential(*(layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.GELU())))[:-1]
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)

    def log_f(x: Tensor, gamma: Tensor, c: Tensor) -> Tensor:
        seen = torch.cat([x.flatten(1), c.flatten(1), gamma[:, None]], dim=1)
        return network(seen).view(-1, L, len(words))  # type: ignore[no-any-return]

    for _ in range(1500):
        s, t = data[torch.randint(len(data), (64,))], (torch.arange(64) + torch.rand(64)) / 64
        value = loss(log_f, E, s, gumbel(t, loc), torch.randn(64, L, d), torch.rand(64) < 0.25)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    # Behind the schedule's end the kernel decides. The flow goes on to where hardly any noise is left (Theorem 1).
    gammas = torch.cat([gumbel((torch.arange(24) + 0.5) / 24, loc), torch.linspace(-1, -16, 24)])
    K, w_scg, w_ug = refinements(2, "A", gammas), adapted(1.5, "A", gammas), torch.zeros(len(gammas))
    end = sample(log_f, E, torch.randn(100, L, d), gammas, K, w_scg, w_ug)
    tokens = by_distance(end, E)
    for row in tokens[:4]:
        print(" ".join(words[j] for j in row))
    print(f"{(tokens[:, None] == data).all(-1).any(-1).sum()} of 100 samples are sentences of the training text")
    arrived = (end.x - E[tokens]).norm(dim=-1) < 0.01 * math.sqrt(d)
    print(f"{arrived.float().mean():.0%} of the positions end at a token embedding, within 1 % of its norm")
    print(f"the two token rules agree at {(tokens == by_weight(end)).float().mean():.0%} of the positions")


if __name__ == "__main__":
    main()
