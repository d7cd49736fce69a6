"""LangFlow: ConvergeFlow's network trained by cross-entropy alone, table and schedule included (arXiv 2604.11748).

Its own sampler makes one call per step, conditioned on the previous step's prediction, on an even grid of q = 1 - t.
With `settings=` it runs under every sampling control of ConvergeFlow, which separates objective from sampler. The
published sampler has no control of its own. `temperature`, off at 1, divides the logits at every call, so that LangFlow
too has a curve between quality and diversity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from convergeflow.errors import UserError, unknown_name
from convergeflow.objective.losses import Objective
from convergeflow.sampling.settings import Settings
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel
from convergeflow.systems.protocol import MakeSettings, Samples, Stage
from convergeflow.systems.rival import TEMPERATURES

_PASSED_ON = ("observe", "clamp", "batch", "noise", "want_logits")
"""What `ConvergeFlowModel.sample` takes besides."""


@dataclass(frozen=True)
class LangFlowConfig(ConvergeFlowConfig):
    """ConvergeFlow's, under a type of its own so that a checkpoint comes back with its own sampler."""

    method: str = "langflow"


class LangFlowModel(ConvergeFlowModel):
    """The weights have ConvergeFlow's names: `init_from` takes them over for its second stage."""

    config_class = LangFlowConfig
    controls: Mapping[str, Any] = {"settings": None, "temperature": 1.0}
    frontier = TEMPERATURES

    @classmethod
    def model_type(cls) -> str:
        return "convergeflow-langflow"

    def __init__(self, config: LangFlowConfig) -> None:
        super().__init__(config)
        if config.predictor != "weighted" or self.learned_schedule is None:
            raise UserError("langflow needs the weighted predictor and a gumbel schedule")
        self.objective, self.fits_schedule = Objective("ce"), True

    def enter_stage(self, stage: Stage) -> None:
        """Cross-entropy, with table and schedule learned, whatever the stage says."""
        self.objective = self._objective("ce", stage)
        self.requires_grad_(True)
        self.fits_schedule = True

    def sampling_arguments(
        self, given: Mapping[str, Any], controls: Mapping[str, Any], settings: MakeSettings, length: int | None = None
    ) -> dict[str, Any]:
        """LangFlow's own sampler, unless an option of ConvergeFlow's is given."""
        if "temperature" in given and "temperature" in controls:
            raise UserError("`temperature` is given twice, as an option and in `set`: give one of them")
        if "settings" in controls:
            raise UserError("`settings` are no control for `set`: give their options one by one")
        own = {name: value for name, value in given.items() if name in ("nfe", "temperature")}
        if len(own) < len(given):
            others = {name: value for name, value in controls.items() if name != "temperature"}
            made = super().sampling_arguments(given, others, lambda schedule, _: settings(schedule, None), length)
            return {**made, "settings": replace(made["settings"], **controls)}
        return {"nfe": 64, **controls, **own}

    def sample(  # type: ignore[override]
        self,
        num: int,
        length: int,
        *,
        seeds: Sequence[int],
        nfe: int = 64,
        settings: Settings | None = None,
        temperature: float = 1.0,
        **how: Any,
    ) -> Samples:
        """LangFlow's own sampler, or any `settings` of ConvergeFlow's (whose nfe wins)."""
        for name in how:
            if name not in _PASSED_ON:
                raise unknown_name("sampling control of langflow", name, [*self.controls, *_PASSED_ON])
        chosen = settings or Settings(nfe=nfe, self_condition="previous", grid="langflow")
        chosen = chosen if temperature == 1.0 else replace(chosen, temperature=temperature)
        return super().sample(num, length, seeds=seeds, settings=chosen, **how)
