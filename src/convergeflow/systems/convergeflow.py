"""The front door: ConvergeFlow as a transformers model with `from_pretrained`, `save_pretrained` and `generate`.

It follows the `LanguageModel` protocol, so the same trainer, evaluator and commands serve it and its rivals. LangFlow
is the same network trained with the other objective. A checkpoint is a folder with config.json, model.safetensors and
tokenizer files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from convergeflow.errors import UserError, unknown_name
from convergeflow.flow.schedule import Gumbel, Schedule, gumbel_for_width, schedule_from
from convergeflow.model import SIZES
from convergeflow.model.network import FlowNetwork, Shape
from convergeflow.model.small_scale import Extras, SmallScaleNetwork
from convergeflow.objective.learned_schedule import LearnedGumbel
from convergeflow.objective.losses import Loss, Objective, fixed_noise_report, flow_loss
from convergeflow.pretrained import load_strictly, quietly
from convergeflow.randomness import RowDraws
from convergeflow.sampling.blocks import Piece, fewest_calls, pieces
from convergeflow.sampling.cohort import Observer
from convergeflow.sampling.integration import batches, default_batch, initial_noise, integrate
from convergeflow.sampling.settings import Settings
from convergeflow.sampling.wrappers import Clamp, NetworkPredictor
from convergeflow.systems.protocol import Samples


class ConvergeFlowConfig(PreTrainedConfig):
    """The shape of a model and its schedule."""

    model_type = "convergeflow"

    def __init__(
        self,
        vocabulary: int = 50257,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        condition_width: int = 128,
        length: int = 1024,
        dropout: float = 0.1,
        predictor: str = "weighted",
        schedule: dict[str, Any] | None = None,
        schedule_entropy: float = 7.02,
        gate_init: float = 0.0,
        context_free_input: bool = False,
        neighbours: int = 0,
        head_init: float = 0.0,
        pool_evidence: bool = False,
        block_length: int | None = None,
        preset: str | None = None,
        method: str = "convergeflow",
        **kwargs: Any,
    ) -> None:
        for name, value in {
            "vocabulary": vocabulary,
            "width": width,
            "depth": depth,
            "heads": heads,
            "length": length,
        }.items():
            if value < 1:
                raise UserError(f"{name} must be at least 1, not {value}")
        self.vocabulary = vocabulary
        self.width = width
        self.depth = depth
        self.heads = heads
        self.condition_width = condition_width
        self.length = length
        self.dropout = dropout
        self.predictor = predictor
        self.schedule = gumbel_for_width(width).describe() if schedule is None else dict(schedule)
        self.schedule_entropy = schedule_entropy
        self.gate_init = gate_init
        self.context_free_input = context_free_input
        self.neighbours = neighbours
        self.head_init = head_init
        self.pool_evidence = pool_evidence
        self.block_length = block_length
        """Tokens that are denoised together after the clean ones before them; none: the whole sequence, the paper's."""
        self.preset = preset
        """The sampling preset that the commands take for this model where the user names none."""
        self.method = method
        super().__init__(**kwargs)

    @classmethod
    def of_size(cls, size: str, **changes: Any) -> ConvergeFlowConfig:
        """A named size: test, small or base (the paper's)."""
        if size not in SIZES:
            raise unknown_name("size", size, SIZES)
        return cls(**{**SIZES[size], **changes})


@dataclass
class FlowOutput(ModelOutput):  # type: ignore[misc]
    """What `forward` returns."""

    logits: Tensor | None = None
    mu: Tensor | None = None


class ConvergeFlowModel(PreTrainedModel):
    """Network, schedule and sampler in one object."""

    config_class: type[ConvergeFlowConfig] = ConvergeFlowConfig
    base_model_prefix = "network"
    main_input_name = "x_t"
    supports_gradient_checkpointing = False
    config: ConvergeFlowConfig

    def __init__(self, config: ConvergeFlowConfig) -> None:
        super().__init__(config)
        shape = Shape(**{field.name: getattr(config, field.name) for field in fields(Shape)})
        extras = Extras(**{field.name: getattr(config, field.name) for field in fields(Extras)})
        self.network = FlowNetwork(shape) if extras == Extras() else SmallScaleNetwork(shape, extras)
        schedule = schedule_from(config.schedule)
        self.learned_schedule = (
            LearnedGumbel(schedule, config.schedule_entropy) if isinstance(schedule, Gumbel) else None
        )
        self.objective = Objective("mse")
        self.fits_schedule = False
        self.tokenizer: Any = None
        """Set by `from_pretrained` where the folder holds one; generation gives ids only without it."""
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: the modules initialise themselves, and loading refuses a file that leaves anything to initialise."""

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def method(self) -> str:
        return self.config.method

    @property
    def schedule(self) -> Schedule:
        """The schedule in force: the learned values where there are any."""
        if self.learned_schedule is not None:
            return self.learned_schedule.schedule()
        return schedule_from(self.config.schedule)

    def set_unigram(self, counts: Tensor) -> None:
        """Token counts of the training text: the context-free prior, and the height of the entropy curve to fit."""
        if counts.shape != (self.config.vocabulary,):
            raise UserError(f"{len(counts)} token counts for a vocabulary of {self.config.vocabulary}")
        share = (counts.double() + 0.5) / (counts.double() + 0.5).sum()
        self.network.log_unigram.copy_(share.log())
        entropy = float(-(share * share.log()).sum())
        self.config.schedule_entropy = entropy
        if self.learned_schedule is not None:
            with torch.no_grad():
                self.learned_schedule.entropy.fill_(entropy)

    def num_parameters_without_table(self) -> int:
        """All parameters but the token table: the paper's "130M" at base size."""
        return sum(p.numel() for p in self.parameters()) - self.network.embedding.weight.numel()

    # -- prediction ----------------------------------------------------------------------------------------------------

    def forward(self, x_t: Tensor, gamma: Tensor, self_condition: Tensor | None = None) -> FlowOutput:
        """Logits and data prediction at noise level gamma [B] for a state [B, L, width]."""
        at = self.schedule.at_gamma(gamma.double())
        log_f = self.network(x_t, at, self_condition)
        if self.config.predictor == "direct":
            return FlowOutput(mu=log_f.weigh(x_t, at).mu)
        logits = log_f.logits(x_t, at)
        return FlowOutput(logits=logits, mu=logits.softmax(-1) @ self.network.embedding.rows())

    # -- training (LanguageModel protocol) -----------------------------------------------------------------------------

    def enter_stage(self, stage: Any) -> None:
        """Objective and trainable parameters of a stage (`config.StageConfig`)."""
        self.objective = Objective(
            stage.objective, stage.self_condition, stage.position_noise, stage.clean_context, self.config.block_length
        )
        self.requires_grad_(True)
        self.network.embedding.weight.requires_grad_(bool(stage.learn_table))
        if not stage.learn_table:
            self.network.embedding.settle()
        self.fits_schedule = bool(stage.learn_schedule)
        if self.fits_schedule and (self.learned_schedule is None or stage.objective != "ce"):
            raise UserError("learn_schedule needs a gumbel schedule and the ce objective")
        if self.learned_schedule is not None:
            self.learned_schedule.requires_grad_(self.fits_schedule)

    def loss(self, tokens: Tensor, *, times: Tensor, draws: RowDraws) -> Loss:
        """The stage's loss; `times` [B] are paper times in (0, 1)."""
        return flow_loss(
            self.network,
            self.schedule,
            self.objective,
            tokens,
            times=times,
            draws=draws,
            learned=self.learned_schedule if self.fits_schedule else None,
        )

    def monitor(self, tokens: Tensor, *, draws: RowDraws) -> dict[str, float]:
        """Cross-entropy, error and gain over the context-free predictor at five fixed noise levels of this width."""
        start = gumbel_for_width(self.config.width)
        levels = start.gamma(torch.tensor([0.9, 0.7, 0.5, 0.3, 0.1])).tolist()
        was_training = self.training
        self.eval()
        try:
            rounded = [round(level, 2) for level in levels]
            return fixed_noise_report(self.network, self.schedule, rounded, tokens, draws, self.config.block_length)
        finally:
            self.train(was_training)

    # -- sampling ------------------------------------------------------------------------------------------------------

    def bind(self) -> NetworkPredictor:
        """A predictor for sampling: the table is normalised once, dropout is off."""
        self.eval()
        with torch.no_grad():
            return NetworkPredictor(self.network, self.schedule, self.network.embedding.rows())

    @torch.no_grad()
    def sample(
        self,
        num: int,
        length: int,
        *,
        seeds: Sequence[int],
        nfe: int = 64,
        observe: Observer | None = None,
        settings: Settings | None = None,
        noise: Tensor | None = None,
        clamp: Clamp | None = None,
        batch: int | None = None,
        want_logits: bool = False,
    ) -> Samples:
        """Generate `num` sequences; `settings` says how (its nfe wins).

        `noise` [num, length, width] takes the place of what the seeds would draw.
        """
        # The direct predictor has no weights to decode by.
        rule = "weight" if self.config.predictor == "weighted" else "prediction"
        settings = settings or Settings(nfe=nfe, decode=rule)
        if len(seeds) != num:
            raise UserError(f"{num} samples need {num} seeds, not {len(seeds)}")
        if num < 1 or length < 1:
            raise UserError("the number and the length of samples must be at least 1")
        if noise is not None and noise.shape != (num, length, self.config.width):
            raise UserError(
                f"the starting noise must have shape {(num, length, self.config.width)}, not {tuple(noise.shape)}"
            )
        predictor = self.bind()
        plan = self.pieces(settings, length, clamp)
        size = batch or default_batch(length, self.config.vocabulary)
        outcomes = []
        for part in batches(num, size):
            start = (
                initial_noise(seeds[part], length, self.config.width, torch.float64, self.device)
                if noise is None
                else noise[part].to(self.device)
            )
            piece = clamp
            if clamp is not None and clamp.tokens.dim() == 2:
                piece = Clamp(clamp.tokens[part], clamp.known[part])
            blocks = {} if self.config.block_length is None else {"pieces": plan, "window": self.config.length}
            outcome = integrate(
                predictor, settings, start, clamp=piece, observe=observe, want_logits=want_logits, **blocks
            )
            outcomes.append(outcome)
        rules = {
            rule: torch.cat([outcome.decoded.tokens[rule] for outcome in outcomes]).cpu()
            for rule in outcomes[0].decoded.tokens
        }
        outcomes[0].decoded.by(settings.decode)  # refuses a rule that does not apply, by name
        ids = rules[settings.decode]
        calls = torch.cat([outcome.calls for outcome in outcomes])
        extras = {"calls": calls, **{f"ids_{rule}": tokens for rule, tokens in rules.items()}}
        if want_logits:
            extras["logits"] = torch.cat([_present(outcome.logits) for outcome in outcomes]).cpu()
        texts = None if self.tokenizer is None else [self.tokenizer.decode(row.tolist()) for row in ids]
        described = {**settings.describe(), "plan": outcomes[0].plan.describe(), "length": length, "batch": size}
        if self.config.block_length is not None:
            described |= {"block_length": settings.block or self.config.block_length, "num_blocks": len(plan)}
        return Samples(ids, list(seeds), int(calls.max()), described, texts, extras)

    def pieces(self, settings: Settings, length: int, clamp: Clamp | None = None) -> list[Piece]:
        """The flows that make one sample: the whole sequence, or block after block."""
        known = 0 if clamp is None else clamp.prompt_length
        return pieces(settings, length, self.config.block_length, known)

    def with_enough_calls(self, settings: Settings, length: int) -> Settings:
        """The same, with as many calls as the blocks of a text of this length need where a preset has fewer."""
        if self.config.block_length is None:
            return settings
        least = fewest_calls(length, settings.block or self.config.block_length)
        return replace(settings, nfe=max(settings.nfe, least))

    def generate(  # type: ignore[override]
        self, num: int = 1, *, length: int | None = None, seed: int = 0, **options: Any
    ) -> Samples:
        """`num` samples with seeds seed, seed + 1, ...; options as in `sample`."""
        return self.sample(num, length or self.config.length, seeds=range(seed, seed + num), **options)

    # -- files ---------------------------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """config.json and model.safetensors, with the learned schedule in both, and the tokenizer if there is one."""
        if self.learned_schedule is not None:
            self.config.schedule = self.learned_schedule.schedule().describe()
            self.config.schedule_entropy = self.learned_schedule.entropy.item()
        with quietly():
            super().save_pretrained(save_directory, **kwargs)
        if self.tokenizer is not None:
            self.tokenizer.save(save_directory)

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, **kwargs: Any) -> ConvergeFlowModel:  # type: ignore[override]
        """Load a checkpoint folder in float32; a missing or unexpected weight is an error, not a warning."""
        return load_strictly(cls, folder, *args, **kwargs)


def _present(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


AutoConfig.register(ConvergeFlowConfig.model_type, ConvergeFlowConfig)
AutoModel.register(ConvergeFlowConfig, ConvergeFlowModel)
