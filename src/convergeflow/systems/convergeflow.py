"""ConvergeFlow as users hold it: network, schedule, loss and sampler in one object.

It follows the `LanguageModel` protocol, so the same trainer, evaluator and commands serve it and its rivals. LangFlow
is the same network trained with the other objective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from convergeflow.device import onto
from convergeflow.errors import UserError
from convergeflow.flow.schedule import Gumbel, Schedule, gumbel_for_width, schedule_from
from convergeflow.model.network import FlowNetwork, Shape
from convergeflow.model.small_scale import Extras, SmallScaleNetwork
from convergeflow.objective.learned_schedule import LearnedGumbel
from convergeflow.objective.losses import Loss, Objective, flow_loss
from convergeflow.randomness import RowDraws
from convergeflow.sampling.blocks import Piece, fewest_calls, pieces
from convergeflow.sampling.cohort import Observer
from convergeflow.sampling.integration import batches, initial_noise, integrate
from convergeflow.sampling.settings import Settings
from convergeflow.sampling.wrappers import Clamp, NetworkPredictor
from convergeflow.systems.config import SystemConfig
from convergeflow.systems.finite import check_end
from convergeflow.systems.likelihood import fixed_noise_report, flow_bound
from convergeflow.systems.protocol import Bound, LanguageModel, MakeSettings, Samples, Stage


@dataclass(frozen=True)
class ConvergeFlowConfig(SystemConfig, Extras, Shape):
    """The network (`Shape` and `Extras`), its schedule, and how it is meant to be sampled."""

    not_chosen: ClassVar[tuple[str, ...]] = (*SystemConfig.not_chosen, "schedule_entropy", "method")

    schedule: dict[str, Any] = field(default_factory=dict)
    """`kind` (gumbel if absent) and its values; a Gumbel's `loc` is 4.723 - ln(768 / width) if absent."""
    schedule_entropy: float = 7.02
    """Height h of the entropy curve that a learned schedule is fitted to."""
    block_length: int | None = None
    """Tokens that are denoised together after the clean ones before them; None is the paper's whole sequence."""
    preset: str | None = None
    """The sampling preset that the commands take for this model if the user names none."""
    method: str = "convergeflow"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_length is not None and self.block_length < 1:
            raise UserError(f"block_length must be at least 1, not {self.block_length}")
        start = gumbel_for_width(self.width).describe()
        given = {name: value for name, value in (self.schedule or {}).items() if value is not None}
        whole = {**start, **given} if given.get("kind", "gumbel") == "gumbel" else given
        schedule_from(whole)  # refuses what is not a schedule
        object.__setattr__(self, "schedule", whole)

    def part(self, kind: type[Any]) -> Any:
        """The fields of `Shape` or `Extras` alone."""
        return kind(**{each.name: getattr(self, each.name) for each in fields(kind)})


class FlowOutput(NamedTuple):
    """What `forward` returns; the direct predictor has no logits."""

    mu: Tensor
    logits: Tensor | None = None


class ConvergeFlowModel(LanguageModel):
    """Network, schedule and sampler."""

    config_class: ClassVar[type[ConvergeFlowConfig]] = ConvergeFlowConfig
    config: ConvergeFlowConfig
    network: FlowNetwork
    bound_kind: str | None = "variational diffusion bound"

    def __init__(self, config: ConvergeFlowConfig) -> None:
        super().__init__(config)
        shape, extras = config.part(Shape), config.part(Extras)
        self.network = FlowNetwork(shape) if extras == Extras() else SmallScaleNetwork(shape, extras)
        schedule = schedule_from(config.schedule)
        self.learned_schedule = (
            LearnedGumbel(schedule, config.schedule_entropy) if isinstance(schedule, Gumbel) else None
        )
        self.objective = Objective("mse")
        self.fits_schedule = False

    @classmethod
    def model_type(cls) -> str:
        return "convergeflow"

    @property
    def method(self) -> str:  # type: ignore[override]
        return self.config.method

    @property
    def schedule(self) -> Schedule:
        """The schedule in force: the learned values if there are any."""
        if self.learned_schedule is not None:
            return self.learned_schedule.schedule()
        return schedule_from(self.config.schedule)

    def as_flow(self) -> ConvergeFlowModel:
        return self

    def set_unigram(self, counts: Tensor, entropy: float | None = None) -> None:
        """Token counts of the training text: the context-free prior, and the height of the entropy curve to fit.

        `entropy` takes the place of the counts' own for that height.
        """
        if counts.shape != (self.config.vocabulary,):
            raise UserError(f"{len(counts)} token counts for a vocabulary of {self.config.vocabulary}")
        share = (counts.double() + 0.5) / (counts.double() + 0.5).sum()
        self.network.log_unigram.copy_(share.log())
        height = float(-(share * share.log()).sum()) if entropy is None else entropy
        self.config = replace(self.config, schedule_entropy=height)
        if self.learned_schedule is not None:
            with torch.no_grad():
                self.learned_schedule.entropy.fill_(height)

    def forward(self, x_t: Tensor, gamma: Tensor, self_condition: Tensor | None = None) -> FlowOutput:
        """Logits and data prediction at noise level gamma [B] for a state [B, L, width]."""
        at = self.schedule.at_gamma(gamma.cpu().double())  # schedules are the host's
        log_f = self.network(x_t, at, self_condition)
        if not log_f.has_weights:
            return FlowOutput(log_f.weigh(x_t, at).mu)
        logits = log_f.logits(x_t, at)
        return FlowOutput(logits.softmax(-1) @ self.network.embedding.rows(), logits)

    def enter_stage(self, stage: Stage) -> None:
        """Objective and trainable parameters of a stage."""
        self.objective = self._objective(stage.objective, stage)
        self.requires_grad_(True)
        self.network.embedding.weight.requires_grad_(bool(stage.learn_table))
        if not stage.learn_table:
            self.network.embedding.settle()
        self.fits_schedule = bool(stage.learn_schedule) and stage.objective == "ce"
        if self.learned_schedule is not None:
            self.learned_schedule.learn(by_fit=self.fits_schedule, by_loss=stage.learn_schedule)
        elif stage.learn_schedule:
            raise UserError("learn_schedule needs a gumbel schedule")

    def _objective(self, kind: str, stage: Stage) -> Objective:
        return Objective(
            kind, stage.self_condition, stage.position_noise, stage.clean_context, self.config.block_length
        )

    def loss(self, tokens: Tensor, *, times: Tensor, draws: RowDraws) -> Loss:
        """The stage's loss; `times` [B] are paper times in (0, 1), float64 on the CPU."""
        learned = self.learned_schedule if self.fits_schedule else None
        levels = self.schedule if self.learned_schedule is None else self.learned_schedule.levels
        return flow_loss(self.network, levels, self.objective, tokens, times=times, draws=draws, learned=learned)

    def monitor(self, tokens: Tensor, *, draws: RowDraws) -> dict[str, float]:
        """Cross-entropy, error and gain over the context-free predictor at five fixed noise levels of this width."""
        levels = gumbel_for_width(self.config.width).gamma(torch.tensor([0.9, 0.7, 0.5, 0.3, 0.1]))
        rounded = [round(level, 2) for level in levels.tolist()]
        with self.evaluating():
            return fixed_noise_report(self.network, self.schedule, rounded, tokens, draws, self.config.block_length)

    def bound_of_ids(self, tokens: Tensor, *, draws: RowDraws, repeats: int = 32, **how: Any) -> Bound:
        """The bound of `likelihood.py` in nats per token; `how` as there."""
        how.setdefault("block_length", self.config.block_length)
        with self.evaluating():
            return flow_bound(self.network, self.schedule, tokens, draws=draws, repeats=repeats, **how)

    def sampling_arguments(
        self, given: Mapping[str, Any], controls: Mapping[str, Any], settings: MakeSettings, length: int | None = None
    ) -> dict[str, Any]:
        if controls:
            raise UserError(f"{self.method} has no control {next(iter(controls))!r} of its own: all are options")
        chosen = settings(self.schedule, self.config.preset)
        if "decode" not in given and self.network.predictor == "direct":  # it has no weights to read tokens off
            chosen = replace(chosen, decode=self.network.head.rule)
        return {"settings": chosen if length is None or "nfe" in given else self.with_enough_calls(chosen, length)}

    def bind(self) -> NetworkPredictor:
        """A predictor for sampling: the table is normalised once, dropout is off."""
        self.eval()
        with torch.no_grad():
            return NetworkPredictor(self.network, self.schedule, self.network.embedding.rows())

    @torch.no_grad()
    def sample(  # type: ignore[override]
        self,
        num: int,
        length: int,
        *,
        seeds: Sequence[int],
        nfe: int = 64,
        observe: Observer | None = None,
        clamp: Clamp | None = None,
        batch: int | None = None,
        settings: Settings | None = None,
        noise: Tensor | None = None,
        want_logits: bool = False,
    ) -> Samples:
        """Generate `num` sequences; `settings` says how (its nfe wins).

        `noise` [num, length, width] takes the place of what the seeds would draw.
        """
        settings = settings or Settings(nfe=nfe, decode=self.network.head.rule)
        self._check_request(num, length, seeds, settings.nfe)
        if want_logits and settings.freeze is not None:
            raise UserError("the final logits need every sequence at the last grid point: drop `freeze` or `logits`")
        width, size = self.config.width, batch or self.batch_size(length)
        if noise is not None and noise.shape != (num, length, width):
            raise UserError(f"the starting noise must have shape {(num, length, width)}, not {tuple(noise.shape)}")
        here, predictor, flows = self.device, self.bind(), self.pieces(settings, length, clamp)
        found: list[dict[str, Tensor]] = []
        for part in batches(num, size):
            start = initial_noise(seeds[part], length, width, here) if noise is None else onto(noise[part], here)
            known = clamp[part] if clamp is not None and clamp.tokens.dim() == 2 else clamp
            carry = partial(integrate, predictor, settings, start, clamp=known, pieces=flows, window=self.config.length)
            end = carry(observe=observe)
            check_end(end, seeds[part], carry)
            by_rule = {f"ids_{name}": tokens for name, tokens in end.decoded.tokens.items()}
            logits = {"logits": end.logits()} if want_logits else {}
            found.append({"ids": end.decoded.by(settings.decode), "calls": end.calls, **by_rule, **logits})
        whole = {name: torch.cat([each[name] for each in found]).cpu() for name in found[0]}
        plan = flows[0].settings.plan(predictor.schedule).describe()
        described = {**settings.describe(), "plan": plan, "length": length, "batch": size}
        if self.config.block_length is not None:
            described |= {"block_length": settings.block or self.config.block_length, "num_blocks": len(flows)}
        return self._samples(whole.pop("ids"), seeds, whole.pop("calls"), described, **whole)

    def pieces(self, settings: Settings, length: int, clamp: Clamp | None = None) -> list[Piece]:
        """The flows that make one sample: the whole sequence, or block after block."""
        known = 0 if clamp is None else clamp.prompt_length
        return pieces(settings, length, self.config.block_length, known)

    def with_enough_calls(self, settings: Settings, length: int) -> Settings:
        """The same, with as many calls as the blocks of a text of this length need if a preset has fewer."""
        if self.config.block_length is None:
            return settings
        least = fewest_calls(length, settings.block or self.config.block_length)
        return replace(settings, nfe=max(settings.nfe, least))

    def save_pretrained(self, folder: str | Path, *, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """A checkpoint folder, with the learned schedule in its config.json too."""
        if self.learned_schedule is not None:
            learned = self.learned_schedule
            self.config = replace(
                self.config, schedule=learned.schedule().describe(), schedule_entropy=learned.entropy.item()
            )
        super().save_pretrained(folder, state_dict=state_dict)
