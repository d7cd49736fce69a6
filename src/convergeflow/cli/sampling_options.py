"""The sampling options that generate, evaluate and sweep share, made from the controls that `Settings` declares.

`takes_sampling_options` adds them to a command, which receives them as one `SamplingOptions` and turns them into
`Settings` once the model, and with it the schedule, is known.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from convergeflow.errors import UserError
from convergeflow.flow.guidance import Controls
from convergeflow.sampling.settings import Freeze, Settings

if typing.TYPE_CHECKING:
    from convergeflow.flow.schedule import Schedule
    from convergeflow.systems.protocol import LanguageModel


@dataclass(frozen=True)
class _Given:
    """What the user gave, an attribute for each option; None means not given."""

    if typing.TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def settings(self, schedule: Schedule, default: str | None = None) -> Settings:
        """Checked settings for a model with this schedule and, if it has one, a preset of its own."""
        from convergeflow.sampling.plan import preset_for

        given = self.given()
        preset = given.pop("preset", default)
        base = Settings() if preset is None else preset_for(preset, schedule, nfe=self.nfe)
        everywhere = given.pop("schedule", None)
        if everywhere is not None:
            given = (
                dict.fromkeys((f.name for f in fields(Controls) if f.name.endswith("_schedule")), everywhere) | given
            )
        controls = {f.name: given.pop(f.name) for f in fields(Controls) if f.name in given}
        controls = {name: value.upper() if isinstance(value, str) else value for name, value in controls.items()}
        limits = {f.name: given.pop(f"freeze_{f.name}") for f in fields(Freeze) if f"freeze_{f.name}" in given}
        if limits and not self.freeze:
            raise UserError(f"`freeze_{next(iter(limits))}` has no effect without `freeze`")
        if self.freeze:
            given["freeze"] = Freeze(**limits)
        if self.grid is not None:
            given["grid"] = _grid(self.grid)
        return replace(base, controls=replace(base.controls, **controls), **given)

    def given(self) -> dict[str, Any]:
        """The options the user set."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value is not False}


def _options() -> Iterator[tuple[str, Any, Any]]:
    """Name, annotation for typer and default of every sampling option."""
    named = "Named settings of the paper, rescaled to this model: see `convergeflow list presets`."
    yield _option("preset", str, f"{named} [default: the model's own, if it has one]")
    hints = typing.get_type_hints(Settings, include_extras=True)
    for control in fields(Settings):
        if control.name == "controls":
            over_time = "Strength over time of all controls: A constant, B /(1+sqrt(sigma/alpha)), C /(1+sigma/alpha)."
            yield _option("schedule", str, f"{over_time} [default: A]")
            yield from _declared(Controls)
        elif control.name == "freeze":
            switch = typer.Option("--freeze", help=typing.get_args(hints["freeze"])[1])
            yield "freeze", Annotated[bool, switch], False
            yield from _declared(Freeze, "freeze_")
        else:
            yield _from_field(control.name, hints[control.name], control.default)


def _declared(settings: type[Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    hints = typing.get_type_hints(settings, include_extras=True)
    for control in fields(settings):
        yield _from_field(prefix + control.name, hints[control.name], control.default)


def _from_field(name: str, hint: Any, default: Any) -> tuple[str, Any, Any]:
    kind, words = typing.get_args(hint)
    if default is not None:
        words += f" [default: {default:g}]" if isinstance(default, float) else f" [default: {default}]"
    # Of several types the first is the one that can be typed: a name, a number.
    return _option(name, (typing.get_args(kind) or (kind,))[0], words)


def _option(name: str, kind: type[Any], words: str) -> tuple[str, Any, Any]:
    return name, Annotated[kind | None, typer.Option(help=re.sub(r"`(\w+)`", r"--\1", words))], None


if typing.TYPE_CHECKING:
    SamplingOptions = _Given
else:
    SamplingOptions = make_dataclass(
        "SamplingOptions", [(name, hint, default) for name, hint, default in _options()], bases=(_Given,), frozen=True
    )


def parse_knobs(pairs: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE pairs; numbers and true/false become what they look like."""
    found: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise UserError(f"`set` needs name=value, not {pair!r}")
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
    shared = fields(SamplingOptions)
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type) for f in shared
    ]
    kept = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in own.parameters.items()
        if name != "sampling"
    ]

    @wraps(function)
    def command(**given: Any) -> Any:
        picked = {f.name: given.pop(f.name) for f in shared}
        return function(sampling=SamplingOptions(**picked), **given)

    command.__signature__ = own.replace(parameters=kept + options)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in kept + options}
    return command
