"""The sampling options that generate, evaluate and sweep share, under the paper's names.

`takes_sampling_options` adds them to a command, which receives them as one `SamplingOptions` and turns them into
`settings.Settings` once the model, and with it the schedule, is known.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from convergeflow.errors import UserError

if typing.TYPE_CHECKING:
    from convergeflow.flow.schedule import Schedule
    from convergeflow.sampling.settings import Settings
    from convergeflow.systems.protocol import LanguageModel


@dataclass(frozen=True)
class SamplingOptions:
    """What the user gave; None means not given."""

    preset: Annotated[
        str | None,
        typer.Option(
            help="Named settings of the paper, rescaled to this model: see `convergeflow list presets`. [default: the "
            "model's own, if it has one]"
        ),
    ] = None
    nfe: Annotated[int | None, typer.Option(help="Network calls per sample, spent exactly. [default: 64]")] = None
    refine: Annotated[int | None, typer.Option(help="K: self-conditioned refinements per step. [default: 1]")] = None
    scg: Annotated[
        float | None, typer.Option(help="w_scg: u + w (mu(c) - u); 1 is plain self-conditioning, 0 none. [default: 1]")
    ] = None
    ug: Annotated[float | None, typer.Option(help="w_ug: the noise-form step times 1 + w; 0 is none. [default: 0]")] = (
        None
    )
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Strength over time of all controls: A constant, B /(1+sqrt(sigma/alpha)), C /(1+sigma/alpha). "
            "[default: A]"
        ),
    ] = None
    refine_schedule: Annotated[str | None, typer.Option(help="The same for --refine alone.")] = None
    scg_schedule: Annotated[str | None, typer.Option(help="The same for --scg alone.")] = None
    ug_schedule: Annotated[str | None, typer.Option(help="The same for --ug alone.")] = None
    self_condition: Annotated[
        str | None,
        typer.Option(
            help="recursive (K + 1 calls a step), previous (last step's prediction, 1 call) or none (1 call)."
        ),
    ] = None
    grid: Annotated[
        str | None,
        typer.Option(
            help="midpoint, langflow, log-snr, closing, theorem, or a .npy file with times. [default: midpoint]"
        ),
    ] = None
    solver: Annotated[
        str | None,
        typer.Option(
            help="euler, euler-noise, multistep (second order), heun, or kernel (between calls the exact kernel is "
            "followed, and on to the end). [default: euler]"
        ),
    ] = None
    decode: Annotated[
        str | None, typer.Option(help="Token rule: weight, prediction or distance. [default: weight]")
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Below 1 sharpens the weights at every call, w^(1/T): fewer errors, less variety. [default: 1]"
        ),
    ] = None
    base_temperature: Annotated[
        float | None, typer.Option(help="The same for f alone, f^(1/T), the kernel staying exact. [default: 1]")
    ] = None
    block: Annotated[
        int | None,
        typer.Option(help="Tokens that are denoised together, for a model of blocks. [default: the model's longest]"),
    ] = None
    freeze: Annotated[
        bool, typer.Option("--freeze", help="Stop computing positions and sequences that have converged.")
    ] = False
    freeze_weight: Annotated[
        float | None, typer.Option(help="A position is settled at this largest weight. [default: 0.9999]")
    ] = None
    freeze_patience: Annotated[
        int | None, typer.Option(help="... held by one token at this many steps in a row. [default: 2]")
    ] = None
    freeze_change: Annotated[
        float | None,
        typer.Option(
            help="Refinement ends at a step once no condition would move by this part of sqrt(width). [default: 0.003]"
        ),
    ] = None

    def settings(self, schedule: Schedule, default: str | None = None) -> Settings:
        """Checked settings for a model with this schedule and, if it has one, a preset of its own."""
        from dataclasses import replace

        from convergeflow.flow.guidance import Controls
        from convergeflow.sampling.settings import Freeze, Settings, preset_for

        preset = self.preset or default
        base = Settings() if preset is None else preset_for(preset, schedule, nfe=self.nfe)
        controls = base.controls
        if self.schedule is not None:
            changes: dict[str, Any] = dict.fromkeys(
                ("refine_schedule", "scg_schedule", "ug_schedule"), self.schedule.upper()
            )
            controls = replace(controls, **changes)
        named: dict[str, Any] = {
            name: value.upper() if isinstance(value, str) else value
            for name in (field.name for field in fields(Controls))
            if (value := getattr(self, name)) is not None
        }
        controls = replace(controls, **named)
        limits = {"weight": self.freeze_weight, "patience": self.freeze_patience, "change": self.freeze_change}
        chosen: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
        if not self.freeze and chosen:
            raise UserError(f"--freeze-{next(iter(chosen))} has no effect without --freeze")
        freeze = Freeze(**chosen) if self.freeze else base.freeze
        plain = {
            name: value
            for name in ("nfe", "self_condition", "solver", "decode", "temperature", "base_temperature", "block")
            if (value := getattr(self, name)) is not None
        }
        grid = base.grid if self.grid is None else _grid(self.grid)
        return replace(base, controls=controls, freeze=freeze, grid=grid, **plain)

    def given(self) -> dict[str, Any]:
        """The options the user set."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) not in (None, False)}


def parse_knobs(pairs: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE pairs; numbers and true/false become what they look like."""
    import json

    found: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise UserError(f"--set needs name=value, not {pair!r}")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def sample_arguments(
    loaded: LanguageModel, sampling: SamplingOptions, knobs: Mapping[str, Any], length: int | None = None
) -> dict[str, Any]:
    """What `model.sample` gets; with a `length` the budget is at least what a text of that length needs."""
    return loaded.sampling_arguments(sampling.given(), knobs, sampling.settings, length)


def _grid(value: str) -> str | tuple[float, ...]:
    if not value.endswith(".npy"):
        return value
    from convergeflow.cli.arrays import read_array

    return tuple(float(t) for t in read_array(Path(value)).reshape(-1))


def takes_sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the parameter `sampling: SamplingOptions` of a command by the options themselves."""
    own = inspect.signature(function)
    hints = typing.get_type_hints(function, include_extras=True)
    shared = typing.get_type_hints(SamplingOptions, include_extras=True)
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=shared[f.name])
        for f in fields(SamplingOptions)
    ]
    kept = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in own.parameters.items()
        if name != "sampling"
    ]

    @wraps(function)
    def command(**given: Any) -> Any:
        picked = {f.name: given.pop(f.name) for f in fields(SamplingOptions)}
        return function(sampling=SamplingOptions(**picked), **given)

    command.__signature__ = own.replace(parameters=kept + options)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in kept + options}
    return command
