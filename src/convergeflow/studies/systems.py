"""Which systems take part, how each is trained on the same budget, and along which controls each is sampled.

The budget is a whole recipe: batch x length x all its stages. ConvergeFlow spends it as the recipe says. LangFlow
spends it on the cross-entropy stages and makes the last of them longer. ELF trains its encoder in the first fifth.
Every other system has one stage. Width, depth, heads, optimizer and seed come from the recipe for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from convergeflow.errors import UserError, unknown_name
from convergeflow.sampling.plan import preset_for
from convergeflow.sampling.settings import Settings
from convergeflow.systems import METHODS, OURS, rivals
from convergeflow.training.config import RunConfig, StageConfig, from_dict

CONTROLLED = "langflow+controls"
"""LangFlow's weights under ConvergeFlow's sampler: the difference that is left comes from the objective."""
SYSTEMS = (*rivals(), CONTROLLED, OURS)
ENCODER_SHARE = 0.2
GUIDANCE = (0.5, 1.0)
"""Multiples of the paper's self-conditioning guidance along our frontier."""
TEMPERATURES = (1.0, 0.85, 0.7)
"""Of the sampler with one call a step. With guidance and the standard sampler, six points: as many as rivals have."""


@dataclass(frozen=True)
class Setting:
    """One point of a system's frontier: its label and the arguments of `model.sample`."""

    label: str
    options: dict[str, Any]


def systems_named(names: str) -> list[str]:
    """A list of systems from `all` or names separated by commas."""
    if names == "all":
        return list(SYSTEMS)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in SYSTEMS:
            raise unknown_name("system", name, SYSTEMS)
    if not wanted or len(set(wanted)) < len(wanted):
        raise UserError("name each system once, separated by commas, or give `all`")
    return wanted


def trained_as(system: str) -> str:
    """The method whose training run a system uses."""
    return "langflow" if system == CONTROLLED else system


def on_budget(base: RunConfig, steps: int) -> RunConfig:
    """The same recipe in `steps` steps: every stage, and its warm-up, shortened or lengthened in proportion."""
    count, share = len(base.stages), steps / base.total_steps
    if steps < count:
        raise UserError(f"the recipe has {count} stages and needs as many steps, not {steps}")
    values = base.to_dict()
    before, end = 0, 0.0
    for index, stage in enumerate(values["stages"]):
        end += stage["steps"] * share
        # At least one step for this stage and for each that follows.
        until = min(max(round(end), before + 1), steps - (count - 1 - index))
        warmup = min(until - before, round(stage["warmup"] * min(1.0, share)))
        stage |= {"steps": until - before, "warmup": warmup}
        before = until
    return from_dict(values)


def run_config(base: RunConfig, method: str) -> RunConfig:
    """The configuration of a method on the budget of `base`."""
    if method == OURS:
        stages = list(base.stages)
    elif method == "langflow":
        stages = _stretched([stage for stage in base.stages if stage.objective == "ce"], base.total_steps)
    elif method == "elf":
        steps = max(1, round(ENCODER_SHARE * base.total_steps))
        flow = _one_stage(base, "flow", base.total_steps - steps, "mse")
        stages = [_one_stage(base, "encoder", steps, "ce"), flow]
    else:
        stages = [_one_stage(base, "train", base.total_steps, "ce")]
    values = base.to_dict()
    values["stages"] = [stage.model_dump(mode="json") for stage in stages]
    values["model"] |= {"method": method, "options": {}}
    return from_dict(values)


def _one_stage(base: RunConfig, name: str, steps: int, objective: Literal["ce", "mse"]) -> StageConfig:
    """The rates of the recipe's first stage; they fall to a twentieth at the end, as in our last stage."""
    first = base.stages[0]
    return StageConfig(
        name=name,
        objective=objective,
        steps=steps,
        lr=first.lr,
        matrix_lr=first.matrix_lr,
        schedule_lr=first.schedule_lr,
        warmup=min(first.warmup, steps),
        lr_schedule="cosine",
        lr_floor=0.05,
        learn_table=True,
        self_condition=first.self_condition,
    )


def _stretched(stages: Sequence[StageConfig], total: int) -> list[StageConfig]:
    if not stages:
        raise UserError("langflow needs a recipe with a ce stage")
    *before, last = stages
    spent = sum(stage.steps for stage in before)
    changes = {"steps": total - spent, "lr_schedule": "cosine", "lr_floor": 0.05}
    return [*before, last.model_copy(update=changes)]


def frontier(system: str, model: Any, nfe: int) -> list[Setting]:
    """The settings of a system at a budget of network calls; the first is its own default."""
    if system not in (OURS, CONTROLLED):
        return [Setting(shown(knobs), {"nfe": nfe, **knobs}) for knobs in model.frontier]
    points = [Setting("standard", {"settings": Settings(nfe=nfe)})]
    for temperature in TEMPERATURES:  # one call a step instead of two: twice the steps for the same calls
        settings = Settings(nfe=nfe, self_condition="previous", temperature=temperature)
        points.append(Setting(f"previous, temperature {temperature:g}", {"settings": settings}))
    guided = _affordable(preset_for("config-c", model.schedule, nfe=nfe), model)
    for factor in GUIDANCE:
        scg = guided.controls.scg * factor
        settings = replace(guided, controls=replace(guided.controls, scg=scg))
        points.append(Setting(f"C, scg {scg:.3g}", {"settings": settings}))
    return points


def controls_swept(system: str) -> list[Any]:
    """What `frontier` sweeps for a system, as JSON values; known without its weights, and part of a result's key."""
    if system in (OURS, CONTROLLED):
        return ["standard", {"temperature": list(TEMPERATURES)}, {"guidance": list(GUIDANCE)}]
    return [dict(knobs) for knobs in METHODS[system].frontier]


def _affordable(settings: Settings, model: Any) -> Settings:
    """With as many refinements as the budget of calls allows."""
    while settings.controls.refine > 1:
        try:
            for flow in model.pieces(settings, model.config.length):
                flow.settings.plan(model.schedule)
            return settings
        except UserError:
            fewer = settings.controls.refine // 2
            settings = replace(settings, controls=replace(settings.controls, refine=fewer))
    return settings


def shown(knobs: Mapping[str, Any]) -> str:
    """Settings in words."""
    return ", ".join(f"{name} {value:g}" for name, value in knobs.items()) or "default"
