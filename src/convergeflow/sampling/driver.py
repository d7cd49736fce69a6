"""Drivers turn the calls of trajectories into network passes, count them, and show them to observers.

Trajectories of one request form a `Cohort`, which keeps step: its observer sees all its rows at a grid point at once.
`drive` sends the calls of any number of cohorts through the network together. Their rows may be at different grid
points, under different plans, temperatures and known tokens; each row gets the tokens that it would get alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from convergeflow.device import state_dtype_of
from convergeflow.errors import UserError
from convergeflow.flow.convergence import normalised_distance
from convergeflow.flow.path import spread
from convergeflow.flow.schedule import Coefficients
from convergeflow.model.fused import Nearest, Weighted, nearest
from convergeflow.model.head import LogF
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.sampling.blocks import Piece, Read, block_after_block
from convergeflow.sampling.decoding import Decoded
from convergeflow.sampling.freezing import NEVER, Freezing, Settled
from convergeflow.sampling.plan import Plan
from convergeflow.sampling.settings import Settings
from convergeflow.sampling.trajectory import Arrival, Call, End, Flow, Prediction, trajectory
from convergeflow.sampling.wrappers import Clamp, Known, NetworkPredictor, Predictor, Rows, Wrapper, tempered, unwrapped

SHARED_SCORES_BYTES = 1 << 28
"""Kernel scores <x, e_j> are kept for the passes of a step up to this size."""


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
    """Tokens in front of the block that this state is, [rows, P]; None if the state is the whole sequence."""
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


Observer = Callable[[Any], None]
"""Called at every grid point with a `Step`; a rival's sampler calls it with what it has."""


@dataclass(frozen=True)
class Endpoint:
    """The end of a batch of samples."""

    end: End
    calls: Tensor
    """Network calls of each sample, counted."""
    plan: Plan
    logits: Tensor | None = None

    @property
    def x(self) -> Tensor:
        """The state where tokens were read off."""
        return self.end.x

    @property
    def final(self) -> Weighted:
        return self.end.weights

    @property
    def decoded(self) -> Decoded:
        return self.end.decoded


class Cohort:
    """Trajectories that keep step, and what they wait for."""

    def __init__(self, flows: Sequence[Flow], rows: Sequence[Tensor], observe: Observer | None = None) -> None:
        self.flows, self.rows, self.observe = flows, rows, observe
        self.watched = observe is not None
        self.calls = torch.zeros(sum(len(each) for each in rows), dtype=torch.long)
        self.ends: dict[int, End] = {}
        self.events: dict[int, Any] = {}
        self.blocks = 0
        """How many blocks were begun."""
        for member in range(len(flows)):
            self._resume(member, None)

    def waiting(self) -> list[int]:
        """The members that wait for a network call, after everything that needs none; empty at the end."""
        while self.events:
            calls = [member for member, event in self.events.items() if isinstance(event, Call)]
            if calls:
                return calls
            if any(isinstance(event, Read) for event in self.events.values()):
                self._read()
            else:
                self._arrive()
        return []

    def send(self, member: int, prediction: Prediction) -> None:
        """Answer a member's call."""
        self.calls[self.rows[member].cpu()] += 1
        self._resume(member, prediction)

    def end(self) -> End:
        """All rows in their order."""
        return End.joined([self.ends[member] for member in range(len(self.flows))], 0)

    def _resume(self, member: int, answer: Any) -> None:
        try:
            self.events[member] = self.flows[member].send(answer)
        except StopIteration as stop:
            self.ends[member] = stop.value
            self.events.pop(member, None)

    def _arrive(self) -> None:
        if self.observe is not None:
            self.observe(self._step([*self.events.items()]))
        for member in list(self.events):
            self._resume(member, None)

    def _step(self, arrivals: list[tuple[int, Arrival]]) -> Step:
        first = arrivals[0][1]
        weights = [arrival.guided.last.weights for _, arrival in arrivals]
        words = [_words(arrival.predictor) for _, arrival in arrivals]
        x = torch.cat([arrival.x for _, arrival in arrivals])
        return Step(
            index=first.point.index,
            num_steps=first.point.num_steps,
            t=first.point.t,
            at=first.point.at.expand(len(x)),
            x_t=x,
            mu=torch.cat([arrival.guided.mu for _, arrival in arrivals]),
            last=Weighted.joined(weights),
            rows=torch.cat([self.rows[member] for member, _ in arrivals]),
            calls=int(self.calls.max()),
            table=first.predictor.table,
            before=None if words[0] is None else torch.cat([each for each in words if each is not None]),
            block=max(0, self.blocks - 1),
        )

    def _read(self) -> None:
        """Let all members read the words before their next block, in one network pass."""
        self.blocks += 1
        reads: dict[int, Read] = {member: event for member, event in self.events.items() if isinstance(event, Read)}
        words = torch.cat([read.words for read in reads.values()])
        whole = next(iter(reads.values())).predictor.after(words)
        start = 0
        for member, read in reads.items():
            index = torch.arange(start, start + len(read.words), device=words.device)
            start += len(read.words)
            # A pass over nothing is none.
            self.calls[self.rows[member].cpu()] += int(words.shape[1] > 0)
            self._resume(member, whole if len(index) == len(words) else Rows(whole, index))


def _words(predictor: Predictor) -> Tensor | None:
    trunk, _ = unwrapped(predictor)
    return trunk.words if isinstance(trunk, NetworkPredictor | Rows) else None


@torch.no_grad()
def drive(cohorts: Sequence[Cohort], shared_bytes: int = SHARED_SCORES_BYTES) -> None:
    """Carry all cohorts to their ends; every network pass carries the waiting rows of all of them."""
    network = Pass(shared_bytes)
    while True:
        waiting = [(cohort, member) for cohort in cohorts for member in cohort.waiting()]
        if not waiting:
            return
        calls = [cohort.events[member] for cohort, member in waiting]
        for (cohort, member), prediction in zip(
            waiting, network.answer(calls, [cohort.watched for cohort, _ in waiting]), strict=True
        ):
            cohort.send(member, prediction)


class Pass:
    """One network pass for many calls; keeps the kernel scores that the passes at one state share."""

    def __init__(self, shared_bytes: int) -> None:
        self.shared_bytes = shared_bytes
        self.states: list[Tensor] = []
        self.scores: Tensor | None = None

    def answer(self, calls: Sequence[Call], watched: Sequence[bool]) -> list[Prediction]:
        """The predictions that the calls wait for, in their order."""
        groups: dict[Hashable, list[int]] = {}
        for number, call in enumerate(calls):
            trunk, _ = unwrapped(call.predictor)
            key = (id(trunk.whole if isinstance(trunk, Rows) else trunk), call.x.shape[1:])
            groups.setdefault(key, []).append(number)
        found: dict[int, Prediction] = {}
        for group in groups.values():
            wanted = [watched[number] or calls[number].point.last for number in group]
            found |= zip(group, self._together([calls[number] for number in group], wanted), strict=True)
        return [found[number] for number in range(len(calls))]

    def _together(self, calls: Sequence[Call], wanted: Sequence[bool]) -> list[Prediction]:
        """One pass of the trunk; one of the head for all calls whose wrappers can be joined."""
        levels = [call.point.at.expand(len(call.x)) for call in calls]
        around = [unwrapped(call.predictor)[1] for call in calls]
        shown = [_shown(call.x, level, wrappers) for call, level, wrappers in zip(calls, levels, around, strict=True)]
        log_f = _trunk(calls)(_cat(shown), Coefficients.stacked(levels), _conditions(calls))
        kinds: dict[Hashable, list[int]] = {}
        for number, wrappers in enumerate(around):
            kinds.setdefault(tuple(wrapper.kind for wrapper in wrappers), []).append(number)
        bounds = torch.tensor([0, *(len(call.x) for call in calls)]).cumsum(0).tolist()
        answers: dict[int, Prediction] = {}
        for members in kinds.values():
            rows = None
            if len(members) < len(calls):
                rows = torch.cat([torch.arange(bounds[n], bounds[n + 1]) for n in members]).to(shown[0].device)
            part = log_f if rows is None else log_f[rows]
            for layer in zip(*(around[number] for number in members), strict=True):
                part = (layer[0] if len(layer) == 1 else layer[0].joined(layer, layer[0].inner)).reading(part)
            details = any(wanted[number] and calls[number].closing for number in members)
            answers |= zip(members, self._weighed(part, [calls[number] for number in members], details), strict=True)
        return [answers[number] for number in range(len(calls))]

    def _weighed(self, log_f: LogF, calls: Sequence[Call], details: bool) -> list[Prediction]:
        states = [call.x for call in calls]
        x, at = _cat(states), Coefficients.stacked([call.point.at.expand(len(call.x)) for call in calls])
        weights = log_f.weigh(x, at, details=details, scores=self._shared(log_f, calls, x))
        if len(calls) == 1:
            return [Prediction(weights.mu.to(x.dtype), weights, log_f)]
        answers, start = [], 0
        for call in calls:
            rows = slice(start, start := start + len(call.x))
            part = weights[rows]
            answers.append(Prediction(part.mu.to(x.dtype), part, log_f[rows]))
        return answers

    def _shared(self, log_f: LogF, calls: Sequence[Call], x: Tensor) -> Tensor | None:
        """Kernel scores of the states, made once for all passes at them."""
        states = [call.x for call in calls]
        size = x.shape[0] * x.shape[1] * len(calls[0].predictor.table) * 4
        if size > self.shared_bytes or not any(call.point.refinements for call in calls):
            return None
        same = len(states) == len(self.states) and all(a is b for a, b in zip(states, self.states, strict=True))
        if not same:
            self.states, self.scores = states, log_f.scores(x)
        return self.scores


def _shown(x: Tensor, at: Coefficients, wrappers: Sequence[Wrapper]) -> Tensor:
    for wrapper in reversed(wrappers):  # outermost first
        x = wrapper.state(x, at)
    return x


def _trunk(calls: Sequence[Call]) -> Predictor:
    trunks = [unwrapped(call.predictor)[0] for call in calls]
    first = trunks[0]
    if not isinstance(first, Rows):
        return first
    return first.whole.rows(torch.cat([trunk.index for trunk in trunks if isinstance(trunk, Rows)]))


def _conditions(calls: Sequence[Call]) -> Tensor | None:
    """The conditions of all calls; zeros, which mean none, only where other calls have one."""
    if all(call.condition is None for call in calls):
        return None
    return _cat([torch.zeros_like(call.x) if call.condition is None else call.condition for call in calls])


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def cohort(
    predictor: Predictor,
    settings: Settings,
    noise: Tensor,
    *,
    clamp: Clamp | None = None,
    observe: Observer | None = None,
    pieces: Sequence[Piece] | None = None,
    window: int = 0,
) -> Cohort:
    """The trajectories of a batch of noise [B, L, d]; with `pieces` they go block after block behind `window` tokens.

    With freezing every row is a trajectory of its own; otherwise all rows are one.
    """
    noise = noise.to(state_dtype_of(noise.device))
    batch, length = noise.shape[:2]
    clamp = None if clamp is None else clamp.resolved(batch, length, predictor.table)
    everything = torch.arange(batch, device=noise.device)
    rows = [everything] if settings.freeze is None else list(everything.split(1))

    def flow(index: Tensor) -> Flow:
        known = None if clamp is None else clamp[index]
        if pieces is None:
            plan = settings.plan(predictor.schedule)
            return _flow(plan, settings, noise[index], predictor, known)

        def piece(part: Piece, behind: Predictor, x: Tensor, known: Clamp | None) -> Flow:
            return _flow(part.settings.plan(predictor.schedule), part.settings, x, behind, known)

        return block_after_block(piece, pieces, noise[index], predictor, known, window)

    found = Cohort([flow(index) for index in rows], rows, observe)
    found.watched = observe is not None or settings.freeze is not None
    return found


def _flow(plan: Plan, settings: Settings, noise: Tensor, predictor: Predictor, clamp: Clamp | None) -> Flow:
    """The trajectory of rows under settings, with every wrapper that they ask for."""
    predictor = tempered(predictor, settings.temperature, settings.base_temperature)
    x, stop = noise.clone(), NEVER
    if settings.freeze is not None:
        stop = Freezing(settings.freeze, predictor.table, x.shape[1])
        predictor = Settled(predictor, (stop,))
    if clamp is None:
        return trajectory(plan, x, predictor, stop)
    known = Known(predictor, clamp, noise)
    return _with_known(trajectory(plan, known.state(x, plan[0].at), known, stop), clamp)


def _with_known(flow: Flow, clamp: Clamp) -> Flow:
    end = yield from flow
    return End(end.x, end.weights, end.decoded.changed(clamp.put), end.logits)


def integrate(
    predictor: Predictor, settings: Settings, noise: Tensor, *, want_logits: bool = False, **how: Any
) -> Endpoint:
    """Carry a batch of noise [B, L, d] along the flow and read off tokens; `how` as in `cohort`."""
    if want_logits and settings.freeze is not None:
        raise UserError("the final logits need every sequence at the last grid point: drop `freeze` or `logits`")
    batch = cohort(predictor, settings, noise, **how)
    drive([batch])
    end = batch.end()
    pieces = how.get("pieces")
    plan = (pieces[0].settings if pieces else settings).plan(predictor.schedule)
    with torch.no_grad():
        return Endpoint(end, batch.calls, plan, end.logits() if want_logits else None)


def initial_noise(seeds: Sequence[int], length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The starting state of each seed, [B, L, d]."""
    draws = RowDraws([derive_seed(seed, "sample") for seed in seeds])
    return draws.normal(length, width, dtype=torch.float64).to(device=device, dtype=dtype)


def batches(num: int, size: int) -> list[slice]:
    """Micro-batches of equal size, the last one smaller if it must be."""
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]


def default_batch(length: int, vocabulary: int) -> int:
    """A micro-batch whose shared scores fit their budget."""
    return max(1, min(64, SHARED_SCORES_BYTES // (4 * length * vocabulary) or 1, math.ceil(65536 / length)))
