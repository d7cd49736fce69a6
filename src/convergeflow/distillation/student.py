"""A student: a ConvergeFlow model that learns to make a teacher's long step with one network call.

It samples with one call a step and is told what it predicted at the step before (`self_condition` previous). Training
follows it: it walks from noise on its own few grid points, and at every state that it comes to the teacher shows what
it would do from there and from what the student thinks so far (`barycentre.py`). So the student learns at the states
that it will meet, after its own errors too. Its grids of 1, 2, 4, 8, ... steps have no point in common: the noise
level tells the network how long its step is, and one student serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from convergeflow.device import onto, state_dtype_of
from convergeflow.distillation.barycentre import Barycentre, Span, barycentres
from convergeflow.flow.schedule import Coefficients
from convergeflow.model.fused import Weighted
from convergeflow.model.views import WHOLE, View
from convergeflow.objective.corruption import Noisy
from convergeflow.objective.losses import Loss, ce, mse
from convergeflow.randomness import RowDraws
from convergeflow.sampling.cohort import Step
from convergeflow.sampling.integration import integrate
from convergeflow.sampling.settings import PRESETS, Settings
from convergeflow.sampling.wrappers import NetworkPredictor
from convergeflow.systems.convergeflow import ConvergeFlowModel
from convergeflow.systems.protocol import Samples


@dataclass(frozen=True)
class Teacher:
    """A frozen flow, and the settings that it is sampled with."""

    model: ConvergeFlowModel
    settings: Settings

    def __deepcopy__(self, memo: Any) -> Teacher:
        return self  # the average of a student has the same teacher

    @property
    def steps(self) -> int:
        """Steps of a whole trajectory of its own."""
        return len(self.settings.plan(self.model.schedule))


@dataclass(frozen=True)
class Visit:
    """States of some rows of a batch at one grid point of a student."""

    span: Span
    at: Coefficients
    condition: Tensor
    """What the student predicted at the step before; zeros at the first."""
    calls: int
    """Steps of the whole walk."""
    rows: Tensor
    """Which rows of the batch."""


class Student(ConvergeFlowModel):
    """Starts as a copy of its teacher; it is saved as an ordinary model."""

    bound_kind = None  # what it predicts is the end of a long step, which bounds nothing

    def __init__(self, config: Any, teacher: Teacher, calls: Sequence[int]) -> None:
        super().__init__(config)
        self.teacher, self.calls = teacher, tuple(calls)
        self.load_strictly(teacher.model.state_dict(), "the teacher")

    def set_unigram(self, counts: Tensor, entropy: float | None = None) -> None:
        """It has its teacher's."""

    def loss(self, tokens: Tensor, *, times: Tensor, draws: RowDraws) -> Loss:
        """The stage's loss at every state of one walk per row: `mse` to mu_bar, or `ce` to w_bar.

        The text is there for models of blocks, which walk behind its words.
        """
        _visits, noisy, shown, prediction = self._lesson(tokens, draws)
        parts = {"mse": mse(shown.mu, noisy, prediction), "ce": ce(shown.mu, noisy, prediction)}
        return Loss(parts[self.objective.kind], {name: value.detach() for name, value in parts.items()})

    @torch.no_grad()
    def monitor(self, tokens: Tensor, *, draws: RowDraws) -> dict[str, float]:
        """Distance to the teacher on fixed noises, by the number of steps of a walk."""
        with self.evaluating():
            visits, _, shown, prediction = self._lesson(tokens, draws)
        assert prediction.cross_entropy is not None
        steps = torch.cat([torch.full((len(visit.rows),), visit.calls) for visit in visits])
        squared, surprise = (
            (prediction.mu - shown.mu).square().mean((1, 2)).cpu(),
            prediction.cross_entropy.mean(1).cpu(),
        )
        found = {}
        for number in sorted(set(self.calls) & set(steps.tolist())):
            found[f"mse@{number}"] = float(squared[steps == number].mean())
            found[f"ce@{number}"] = float(surprise[steps == number].mean())
        return found

    def sample(self, num: int, length: int, *, nfe: int = 8, settings: Settings | None = None, **how: Any) -> Samples:  # type: ignore[override]
        """As its own preset does where no settings are given."""
        return super().sample(num, length, settings=settings or own_settings(nfe), **how)

    def _lesson(self, tokens: Tensor, draws: RowDraws) -> tuple[list[Visit], Noisy, Barycentre, Weighted]:
        """The states of a walk, what the teacher shows there, and what the student predicts."""
        self.teacher.model.to(self.device)
        span = self._block(tokens.shape[1], draws)
        words = tokens[:, : span.start]
        visits = self._walk(words, span.stop - span.start, draws)
        shown = self._shown(words, visits, draws)
        x, condition = (torch.cat(parts) for parts in zip(*((v.span.x, v.condition) for v in visits), strict=True))
        at, rows = Coefficients.joined([visit.at for visit in visits]), torch.cat([visit.rows for visit in visits])
        table = self.network.embedding.rows()
        view: View = WHOLE
        if span.start:
            view = self.network.remember(table[words], table).rows(onto(rows, self.device))
        said, whole = self.network(x, at, condition, view, table), Barycentre.joined(shown)
        prediction = said.weigh(x, at, targets=whole.tokens)
        if whole.weights is not None:  # the mean over all draws, which has less noise than one
            exact = -(whole.weights * said.logits(x, at).log_softmax(-1)).sum(-1)
            prediction = replace(prediction, cross_entropy=exact)
        return visits, Noisy(x, at, view), whole, prediction

    def _block(self, length: int, draws: RowDraws) -> range:
        """The positions that a walk makes: all, or one block of a model of blocks."""
        longest = self.config.block_length
        if longest is None:
            return range(length)
        starts = range(0, length, longest)
        start = starts[int(float(draws.uniform()[0]) * len(starts))]
        return range(start, min(start + longest, length))

    @torch.no_grad()
    def _walk(self, words: Tensor, length: int, draws: RowDraws) -> list[Visit]:
        """From noise to tokens, every row with one of the numbers of calls, as the sampler does it."""
        was_training, predictor = self.training, behind(self.bind(), words)
        self.train(was_training)
        noise = draws.normal(length, self.config.width, dtype=state_dtype_of(draws.device))
        chosen = (draws.uniform() * len(self.calls)).long().clamp(max=len(self.calls) - 1)
        visits = []
        for number in sorted(set(self.calls)):
            rows = torch.tensor([row for row, place in enumerate(chosen.tolist()) if self.calls[place] == number])
            if len(rows) == 0:
                continue
            seen: list[Step] = []
            integrate(predictor.rows(rows), own_settings(number), noise[onto(rows, noise.device)], observe=seen.append)
            ends = [*(step.t for step in seen[1:]), 1.0]
            before = [torch.zeros_like(seen[0].mu), *(step.mu for step in seen)]
            for step, end, condition in zip(seen, ends, before, strict=False):
                span = Span(step.x_t, step.t, end, condition if step.index else None)
                visits.append(Visit(span, step.at, condition, number, rows))
        return visits

    def _shown(self, words: Tensor, visits: list[Visit], draws: RowDraws) -> list[Barycentre]:
        """What the teacher shows at each visit, in as many substeps as a trajectory of its own would have there."""
        predictor = behind(self.teacher.model.bind(), words)
        steps = self.teacher.steps
        return barycentres(
            [predictor.rows(visit.rows) if words.shape[1] else predictor for visit in visits],
            self.teacher.settings,
            [visit.span for visit in visits],
            [max(1, steps // visit.calls) for visit in visits],
            [draws.select(visit.rows) for visit in visits],
        )


def own_settings(calls: int) -> Settings:
    """How a student is sampled: one call a step, with the prediction of the step before."""
    return replace(PRESETS["swift"], nfe=calls)


@torch.no_grad()
def behind(predictor: NetworkPredictor, words: Tensor) -> NetworkPredictor:
    """The predictor behind words [B, P], if there are any."""
    return predictor.after(words) if words.shape[1] else predictor
