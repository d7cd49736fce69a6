"""Sampling: a predictor, a grid, guidance, a solver and a token rule put together (paper Sec. 3.2, 4).

The recursion at grid point i is u = mu(x, t, none), then K_i times p = (1 - w_i) u + w_i mu(x, t, p), the guided
prediction fed back as the next condition; p drives the solver. At the last point the K-th refinement is used as it is,
without extrapolation, and decoded: no step follows. Every network call is counted. The state is float64 where the
device has it, the network keeps its own format, and each sample draws from its own seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from convergeflow.decoding import Decoded, decode
from convergeflow.device import state_dtype_of
from convergeflow.errors import UserError
from convergeflow.flow.convergence import normalised_distance
from convergeflow.flow.path import spread
from convergeflow.flow.schedule import Coefficients, Schedule
from convergeflow.flow.solver import closing_gamma, follow, opening_gamma, substeps
from convergeflow.model.head import Nearest, Weighted, nearest
from convergeflow.model.network import BaseLogits, CleanWords
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.records import Observer
from convergeflow.settings import Plan, Settings

SHARED_SCORES_BYTES = 1 << 28
"""Kernel scores <x, e_j> are kept for the passes of a step up to this size."""


class Predictor(Protocol):
    """What the sampler needs of a network: predictions, its normalised table, and its schedule."""

    table: Tensor
    schedule: Schedule

    def __call__(
        self,
        x_t: Tensor,
        at: Coefficients,
        condition: Tensor | None,
        *,
        details: bool = False,
        scores: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Weighted:
        """The data prediction at state x_t [B, L, d]."""

    def scores(self, x_t: Tensor) -> Tensor | None:
        """Kernel scores that all passes at x_t share, or None if the network has no use for them."""

    def logits(self, x_t: Tensor, at: Coefficients, condition: Tensor | None) -> Tensor:
        """The logits of the weights, [B, L, V]."""


@runtime_checkable
class BlockPredictor(Protocol):
    """What one that samples in blocks has besides."""

    def remember(self, tokens: Tensor) -> CleanWords:
        """What a block sees of the tokens [B, P] in front of it: given to each call, and to `logits`, as `after=`."""


@runtime_checkable
class KernelPredictor(Protocol):
    """What one that the `kernel` solver can sample has besides."""

    def base(
        self, x_t: Tensor, at: Coefficients, condition: Tensor | None, *, after: CleanWords | None = None
    ) -> BaseLogits:
        """log f at a state: one network call."""


@dataclass(frozen=True)
class Clamp:
    """Known tokens along the path: a heuristic, not exact conditioning.

    At every grid point the known positions are put where the forward process would have them, alpha e + sigma z with
    the sample's own noise, and their prediction is their embedding. The unknown positions see the right noise level,
    but the flow was not trained to be steered: consistency with the known text is encouraged, not guaranteed.
    """

    tokens: Tensor
    """[L] or [B, L]; values where not known are ignored."""
    known: Tensor
    """Boolean, same shape."""


@dataclass(frozen=True)
class Step:
    """What an observer sees after the prediction at a grid point."""

    index: int
    num_steps: int
    t: float
    at: Coefficients
    x_t: Tensor
    mu: Tensor
    """The guided prediction that drives the step."""
    last: Weighted
    """The last network output at this point, with token and top weight."""
    rows: Tensor
    """Which samples of the batch these are; finished ones are left out."""
    calls: int
    """Network calls so far."""
    table: Tensor
    before: Tensor | None = None
    """Tokens in front of the block that this state is, [rows, P]; none: the state is the whole sequence."""
    block: int = 0
    """The number of that block."""

    def distances(self) -> Nearest:
        """Normalised distances ||x - alpha e_j||/(sigma sqrt d) to the nearest and second-nearest embedding."""
        scale = spread(self.at.alpha, self.x_t)[..., 0].expand(self.x_t.shape[:-1])
        found = nearest(self.x_t, self.table, scale=scale, second=True)
        width = self.x_t.shape[-1]
        assert found.second_distance is not None
        return Nearest(
            found.token,
            normalised_distance(found.distance, self.at, width),
            normalised_distance(found.second_distance, self.at, width),
        )


@dataclass(frozen=True)
class Outcome:
    """The end of a batch of trajectories."""

    decoded: Decoded
    calls: Tensor
    """Network calls of each sample, counted."""
    x: Tensor
    """State at the last grid point."""
    final: Weighted
    logits: Tensor | None
    plan: Plan


def initial_noise(
    seeds: Sequence[int], length: int, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The starting state of each seed, [B, L, d]."""
    draws = RowDraws([derive_seed(seed, "sample") for seed in seeds])
    return draws.normal(length, width, dtype=torch.float64).to(device=device, dtype=dtype)


@torch.no_grad()
def integrate(
    predictor: Predictor,
    settings: Settings,
    noise: Tensor,
    *,
    clamp: Clamp | None = None,
    observe: Observer | None = None,
    want_logits: bool = False,
    before: Tensor | None = None,
) -> Outcome:
    """Carry a batch of noise [B, L, d] along the flow and read off tokens; `before`: tokens [B, P] in front of it."""
    if want_logits and settings.freeze is not None:
        raise UserError("final logits need every sequence at the last grid point: drop --freeze or --logits")
    return _Integration(predictor, settings, noise, clamp, observe, want_logits, before).run()


class _Integration:
    """One batch on its way; its attributes are the loop's state."""

    def __init__(
        self,
        predictor: Predictor,
        settings: Settings,
        noise: Tensor,
        clamp: Clamp | None,
        observe: Observer | None,
        want_logits: bool,
        before: Tensor | None,
    ) -> None:
        self.predictor = _tempered(predictor, settings)
        self.settings, self.observe, self.want_logits = settings, observe, want_logits
        self.before = before
        self.after = None if before is None else _reader(predictor).remember(before)
        self.table = predictor.table
        self.plan = settings.plan(predictor.schedule)
        self.details = observe is not None or settings.freeze is not None
        dtype = state_dtype_of(noise.device)
        self.noise = noise.to(dtype)
        self.x = self.noise.clone()
        batch, length = noise.shape[:2]
        # To read what stands before a block is a pass through the network, too.
        self.calls = torch.full((batch,), int(before is not None and before.shape[1] > 0))
        self.rows = torch.arange(batch, device=noise.device)
        """Samples still on their way; tensors of the loop hold these rows only."""
        self.clamp = _resolve_clamp(clamp, batch, length, self.table)
        self.history: tuple[Tensor, Coefficients] | None = None
        self.settled = torch.zeros(batch, length, dtype=torch.bool, device=noise.device)
        self.streak = torch.zeros(batch, length, dtype=torch.long, device=noise.device)
        self.tokens = torch.full((batch, length), -1, dtype=torch.long, device=noise.device)
        self.condition: Tensor | None = None
        self.last: Weighted | None = None
        self.base: BaseLogits | None = None
        self.bases: list[tuple[float, BaseLogits]] = []
        """For the `kernel` solver: what the calls at this point said, and how much of each drives the step."""
        self.finished: list[tuple[Tensor, Weighted, Tensor, Coefficients]] = []
        """State, last prediction, rows and noise level of what has ended."""

    def run(self) -> Outcome:
        num_steps = self.plan.allocation.num_steps
        for i in range(num_steps):
            now = self._at(i)
            self._place_known(now)
            final = i == num_steps - 1
            mu = self._predict(self.x, now, i, final=final)
            self._report(i, now, mu)
            if final:
                if self.plan.solver.kernel:
                    self._close(i, now)
                break
            self._advance(i, now, mu)
            if self.settings.freeze is not None and self._retire(i, mu):
                break
        return self._finish()

    def _at(self, i: int) -> Coefficients:
        return self.plan.points[i].expand(len(self.x))

    def _advance(self, i: int, now: Coefficients, mu: Tensor) -> None:
        then = self._at(i + 1)
        w_ug = self.plan.w_ug[i]
        if self.plan.solver.kernel:
            self.x = self._follow(i, now, float(then.gamma[0]), w_ug)
            if self.settings.self_condition == "previous":
                self.condition = self._driving(self.x, then)
            return
        moved = self.plan.solver.advance(self.x, mu, now, then, w_ug=w_ug, history=self.history)
        if self.plan.allocation.is_corrected(i):
            mu_then = self._predict(moved, then, i + 1, final=False)
            moved = self.plan.solver.correct(self.x, mu, mu_then, now, then, w_ug=w_ug)
        self.history = (mu, now)
        self.x = moved

    def _follow(self, i: int, now: Coefficients, end: float, w_ug: float = 0.0) -> Tensor:
        """The state at gamma = end under the exact kernel, log f staying as the calls at point i gave it."""
        start, x, schedule = float(now.gamma[0]), self.x, self.predictor.schedule
        # Noise alone at the first grid point lacks the word that the path would already hold there.
        late = i == 0 and start < (opening := opening_gamma(x.shape[-1]))
        levels = substeps(schedule, opening if late else start, end, len(x), leap=late)
        if late:
            x = self.noise * spread(levels[0].sigma, x)
        return follow(x, self._driving, levels, w_ug=w_ug)

    def _shares(self, w: float) -> list[tuple[float, BaseLogits]]:
        """(1 - w) of the unconditional call and w of the latest one, for the `kernel` solver."""
        if self.base is None:
            return []
        return [(1.0, self.base)] if w == 1.0 else [(1.0 - w, self.bases[0][1]), (w, self.base)]

    def _driving(self, x: Tensor, at: Coefficients) -> Tensor:
        mu = sum(share * base.weigh(x, at).mu.to(x.dtype) for share, base in self.bases)
        assert isinstance(mu, Tensor)
        return self._fill_known(mu)

    def _close(self, i: int, now: Coefficients) -> None:
        """On to where the kernel decides every token, without a call; what is decoded is not extrapolated."""
        base = self.bases[-1][1]
        self.bases = [(1.0, base)]
        end = min(closing_gamma(self.x.shape[-1]), float(now.gamma[0]))
        self.x = self._follow(i, now, end)
        self.closed = self.predictor.schedule.at_gamma(torch.tensor(end, dtype=torch.float64))
        at = self.closed.expand(len(self.x))
        found = base.weigh(self.x, at, details=True)
        self.last = replace(found, mu=self._fill_known(found.mu))
        if self.want_logits:
            self.logits = base.logits(self.x, at)

    closed: Coefficients | None = None

    def _predict(self, x: Tensor, now: Coefficients, i: int, *, final: bool) -> Tensor:
        """The (guided) prediction at a state, in the state's format."""
        refinements, w = self.plan.allocation.refinements[i], self.plan.w_scg[i]
        if self.settings.self_condition == "previous":
            self.condition = self._call(x, now, self.condition, details=self.details or final, final=final).mu
            self.bases = self._shares(1.0)
            return self.condition.to(x.dtype)
        small = x.shape[0] * x.shape[1] * len(self.table) * 4 <= SHARED_SCORES_BYTES
        scores = self.predictor.scores(x) if refinements > 0 and small and self.before is None else None
        unconditional = self._call(
            x, now, None, scores=scores, details=refinements == 0 and (self.details or final),
            final=final and refinements == 0,
        ).mu  # fmt: skip
        self.bases = self._shares(1.0)
        guided, active = unconditional, torch.arange(len(x), device=x.device)
        last: Weighted | None = None
        moves = torch.full((len(x),), math.inf, dtype=torch.float64, device=x.device)
        """How far each sequence's condition moved in the pass before, relative to sqrt(width)."""
        for k in range(refinements):
            closing = k == refinements - 1
            out = self._call(
                x,
                now,
                guided,
                scores=scores,
                # With freezing any pass may be a sequence's last.
                details=(closing or self._may_end_early) and (self.details or final),
                final=final and closing,
                part=active,
            )
            last = out if last is None else _with_rows(last, out, active)
            # Extrapolation amplifies rounding: it is done in the state's format, not the network's.
            moved = torch.lerp(unconditional[active].to(x), out.mu.to(x), w)
            moved = self._fill_known(moved, active)
            before, guided = guided[active], guided.to(x.dtype).index_copy(0, active, moved)
            if self._may_end_early:
                earlier, moves[active] = moves[active], _largest_move(before, moved)
                active = active[self._is_moving(earlier, moves[active])]
                if len(active) == 0:
                    break
        if last is not None:
            self.last = last
            self.bases = self._shares(w)
            # The prediction that is decoded is not extrapolated.
            guided = last.mu if final else guided
        return guided.to(x.dtype)

    @property
    def _may_end_early(self) -> bool:
        return self.settings.freeze is not None and self.settings.freeze.change > 0

    def _is_moving(self, earlier: Tensor, latest: Tensor) -> Tensor:
        """Which sequences the passes to come would still move, from their last two moves, [rows]."""
        assert self.settings.freeze is not None
        ratio = latest / earlier
        # A first move has none before it to be judged by: what is left counts as large as the move itself.
        left = torch.where(earlier.isinf(), latest, latest * ratio / (1.0 - ratio).clamp_min(0.0))
        return ~(left <= self.settings.freeze.change)

    def _call(
        self,
        x: Tensor,
        now: Coefficients,
        condition: Tensor | None,
        *,
        scores: Tensor | None = None,
        details: bool = False,
        final: bool = False,
        part: Tensor | None = None,
    ) -> Weighted:
        """One counted network call, on some of the live rows or all; settled positions keep their embedding and skip
        the head."""
        rows = self.rows
        if part is not None and len(part) < len(rows):
            rows, x, now = rows[part], x[part], now[part.cpu()]
            condition = None if condition is None else condition[part]
            scores = None if scores is None else scores[part]
        self.calls[rows.cpu()] += 1
        settled = self.settled[rows]
        if self.plan.solver.kernel:
            if not isinstance(self.predictor, KernelPredictor):
                raise UserError(f"{type(self.predictor).__name__} has no base logits for --solver kernel")
            self.base = self.predictor.base(x, now, condition, **self._in_front(rows))
            out = self.base.weigh(x, now, details=details, scores=scores)
        elif bool(settled.any()):
            live = ~settled
            some = self.predictor(
                x, now, condition, details=details, scores=scores, positions=live, **self._in_front(rows)
            )
            out = self._merge(some, live, rows)
        else:
            out = self.predictor(x, now, condition, details=details, scores=scores, **self._in_front(rows))
        out = replace(out, mu=self._fill_known(out.mu, part))
        if final and self.want_logits and not self.plan.solver.kernel:
            self.logits = self.predictor.logits(x, now, condition, **self._in_front(rows))
        self.last = out
        return out

    def _in_front(self, rows: Tensor) -> dict[str, Any]:
        """What the predictor remembers of the tokens before the block, for those that have any."""
        if self.after is None:
            return {}
        return {"after": self.after if len(rows) == len(self.calls) else self.after.rows(rows)}

    def _merge(self, part: Weighted, live: Tensor, rows: Tensor) -> Weighted:
        """A record over all positions from one over the live ones."""
        tokens = self.tokens[rows]
        mu = self.table[tokens.clamp_min(0)]
        mu[live] = part.mu
        token = top = None
        if part.token is not None and part.top_weight is not None:
            token, top = (
                tokens.clone(),
                torch.ones(tokens.shape, dtype=part.top_weight.dtype, device=tokens.device),
            )
            token[live], top[live] = part.token, part.top_weight
        return Weighted(mu, log_normaliser=mu.new_zeros(tokens.shape), token=token, top_weight=top)

    def _place_known(self, now: Coefficients) -> None:
        if self.clamp is None:
            return
        tokens, known = self.clamp.tokens[self.rows], self.clamp.known[self.rows]
        target = self.table[tokens].to(self.x.dtype)
        placed = spread(now.alpha, self.x) * target + spread(now.sigma, self.x) * self.noise[self.rows]
        self.x = torch.where(known[..., None], placed, self.x)

    def _fill_known(self, mu: Tensor, part: Tensor | None = None) -> Tensor:
        if self.clamp is None:
            return mu
        rows = self.rows if part is None else self.rows[part]
        tokens, known = self.clamp.tokens[rows], self.clamp.known[rows]
        return torch.where(known[..., None], self.table[tokens].to(mu.dtype), mu)

    def _report(self, i: int, now: Coefficients, mu: Tensor) -> None:
        if self.observe is None:
            return
        assert self.last is not None
        self.observe(
            Step(
                index=i,
                num_steps=self.plan.allocation.num_steps,
                t=float(self.plan.allocation.grid[i]),
                at=now,
                x_t=self.x,
                mu=mu,
                last=self.last,
                rows=self.rows,
                calls=int(self.calls.max()),
                table=self.table,
                before=None if self.before is None else self.before[self.rows],
            )
        )

    def _retire(self, i: int, mu: Tensor) -> bool:
        """Settle positions, set finished sequences aside; True when none is left. `mu` drove the step."""
        freeze, last = self.settings.freeze, self.last
        assert freeze is not None and last is not None
        if last.token is None or last.top_weight is None:
            raise UserError("freezing needs the weighted predictor: the direct one has no weights")
        rows = self.rows
        away = _distance(mu, self.table[last.token])
        sure = (last.top_weight >= freeze.weight) & (away <= 2.0 * (1.0 - freeze.weight))
        steady = sure & (last.token == self.tokens[rows])
        self.streak[rows] = torch.where(steady, self.streak[rows] + 1, sure.long())
        self.tokens[rows] = last.token
        self.settled[rows] |= self.streak[rows] >= freeze.patience
        done = self.settled[rows].all(-1)
        if bool(done.any()):
            self.finished.append((self.x[done], _select(last, done), rows[done], self.plan.points[i + 1]))
            live = ~done
            self.x, self.rows, self.last = self.x[live], rows[live], _select(last, live)
            if self.history is not None:
                before = self.history[1]
                self.history = (self.history[0][live], before[live.cpu()])
            if self.condition is not None:
                self.condition = self.condition[live]
        return len(self.rows) == 0

    def _finish(self) -> Outcome:
        """Decode every sample at the point where it ended, in the original order."""
        ended = list(self.finished)
        if len(self.rows):
            assert self.last is not None
            ended.append((self.x, self.last, self.rows, self.plan.points[-1] if self.closed is None else self.closed))
        end = self.predictor.schedule(torch.tensor(1.0, dtype=torch.float64))
        order = torch.cat([rows for _, _, rows, _ in ended]).argsort()
        rules: dict[str, list[Tensor]] = {}
        for x, last, _, now in ended:
            decoded = decode(last, x, now.expand(len(x)), end.expand(len(x)), self.table)
            for rule, tokens in decoded.tokens.items():
                rules.setdefault(rule, []).append(tokens)
        joined = {rule: torch.cat(parts)[order] for rule, parts in rules.items()}
        if self.clamp is not None:
            joined = {
                rule: torch.where(self.clamp.known, self.clamp.tokens, found)
                for rule, found in joined.items()
            }
        finals = [last for _, last, _, _ in ended]
        final = Weighted(
            mu=torch.cat([last.mu for last in finals])[order],
            log_normaliser=torch.cat([last.log_normaliser for last in finals])[order],
            token=joined.get("weight"),
            top_weight=_joined([last.top_weight for last in finals], order),
        )
        x = torch.cat([x for x, _, _, _ in ended])[order]
        logits = self.logits if self.want_logits else None
        return Outcome(Decoded(joined), self.calls, x, final, logits, self.plan)

    logits: Tensor | None = None


def _reader(predictor: Predictor) -> BlockPredictor:
    if not isinstance(predictor, BlockPredictor):
        raise UserError(f"{type(predictor).__name__} reads no tokens in front of a block")
    return predictor


def _tempered(predictor: Predictor, settings: Settings) -> Predictor:
    if (settings.temperature, settings.base_temperature) == (1.0, 1.0):
        return predictor
    if not hasattr(predictor, "tempered"):
        raise UserError(f"{type(predictor).__name__} has no temperature")
    changed: Predictor = predictor.tempered(settings.temperature, settings.base_temperature)
    return changed


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """||a - b|| at each position, relative to sqrt(width)."""
    return torch.linalg.vector_norm(a - b.to(a), dim=-1) / math.sqrt(a.shape[-1])


def _largest_move(before: Tensor, after: Tensor) -> Tensor:
    """The largest distance over the positions of each sequence, [rows]."""
    return _distance(after, before).amax(-1).double()


def _joined(parts: list[Tensor | None], order: Tensor) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present)[order] if len(present) == len(parts) else None


def _with_rows(whole: Weighted, part: Weighted, rows: Tensor) -> Weighted:
    """A record in which some rows are replaced."""

    def put(old: Tensor | None, new: Tensor | None) -> Tensor | None:
        return new if old is None or new is None else old.index_copy(0, rows, new)

    mu, log_normaliser = put(whole.mu, part.mu), put(whole.log_normaliser, part.log_normaliser)
    assert mu is not None and log_normaliser is not None
    return Weighted(mu, log_normaliser, put(whole.token, part.token), put(whole.top_weight, part.top_weight))


def _select(record: Weighted, rows: Tensor) -> Weighted:
    return Weighted(
        record.mu[rows],
        record.log_normaliser[rows],
        None if record.token is None else record.token[rows],
        None if record.top_weight is None else record.top_weight[rows],
    )


def _resolve_clamp(clamp: Clamp | None, batch: int, length: int, table: Tensor) -> Clamp | None:
    if clamp is None:
        return None
    if clamp.tokens.shape != clamp.known.shape or clamp.tokens.shape[-1] != length:
        raise UserError(f"the known tokens must have length {length}, not {tuple(clamp.tokens.shape)}")
    tokens = torch.where(clamp.known, clamp.tokens, torch.zeros_like(clamp.tokens))
    if int(tokens.min()) < 0 or int(tokens.max()) >= len(table):
        raise UserError(f"a known token lies outside the vocabulary of {len(table)}")
    shape = (batch, length)
    return Clamp(tokens.expand(shape).to(table.device), clamp.known.expand(shape).to(table.device))


def batches(num: int, size: int) -> list[slice]:
    """Micro-batches of equal size, the last one smaller if it must be."""
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]


def default_batch(length: int, vocabulary: int) -> int:
    """A micro-batch whose shared scores fit their budget."""
    return max(1, min(64, SHARED_SCORES_BYTES // (4 * length * vocabulary) or 1, math.ceil(65536 / length)))
