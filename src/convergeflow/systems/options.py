"""Settings from options that a user gave by name: what the command line and the server share.

Options are the fields of `Settings`, `Controls` and, with `freeze_` before them, `Freeze`; `preset` is where to start,
a name or settings, `schedule` is A, B or C for all three controls, and `freeze` is a switch.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from convergeflow import files
from convergeflow.errors import UserError
from convergeflow.flow.guidance import GUIDANCE, Controls
from convergeflow.sampling.settings import Freeze, Settings

if typing.TYPE_CHECKING:
    from convergeflow.flow.schedule import Schedule


def settings_of(given: Mapping[str, Any], schedule: Schedule, default: str | None = None) -> Settings:
    """Checked settings for a model with this schedule and, if it has one, a preset of its own."""
    from convergeflow.sampling.plan import preset_for

    given = {name: value for name, value in given.items() if value is not None and value is not False}
    named = given.pop("preset", None)
    base = default if named is None else named
    base = Settings() if base is None else base
    if not isinstance(base, Settings):
        base = preset_for(base, schedule, nfe=given.get("nfe"))
    if named is None and given.get("self_condition", "recursive") != "recursive":
        base = replace(base, controls=Controls())  # nobody asked for the refinements of the model's own preset
    controls = _controls(given, base.controls)
    _freeze(given)
    return replace(base, controls=controls, **given)


def _controls(given: dict[str, Any], base: Controls) -> Controls:
    """The controls among the options, which leave `given`; a schedule of its own needs a strength."""
    names = [f.name for f in fields(Controls)]
    for name in given:
        strength = name.removesuffix("_schedule")
        if name in names and strength != name and strength not in given and not getattr(base, strength):
            raise UserError(f"`{name}` has no effect without `{strength}`: give that too")
    everywhere = given.pop("schedule", None)
    schedules = {} if everywhere is None else {n: everywhere for n in names if n.endswith("_schedule")}
    found = schedules | {name: given.pop(name) for name in names if name in given}
    return replace(base, **{name: _registered(value) for name, value in found.items()})


def _freeze(given: dict[str, Any]) -> None:
    """Put one `Freeze` in the place of the switch, or of the limits that Python has, and of further limits."""
    limits = {f.name: given.pop(f"freeze_{f.name}") for f in fields(Freeze) if f"freeze_{f.name}" in given}
    before = given.get("freeze")
    if limits and not before:
        raise UserError(f"`freeze_{next(iter(limits))}` has no effect without `freeze`")
    if before:
        given["freeze"] = replace(before, **limits) if isinstance(before, Freeze) else Freeze(**limits)


def tuned(path: str) -> Settings:
    """Settings from a file that `convergeflow tune` wrote. A client of a server must not name one."""
    values = files.read_json(path, fix="`convergeflow tune` makes such files")
    try:
        found: Settings = files.check_type(values["settings"], Settings)
    except (UserError, KeyError, TypeError) as wrong:
        raise UserError(f"{path} holds no settings of `convergeflow tune` ({wrong})") from None
    return found


def _registered(value: Any) -> Any:
    """A guidance schedule as it is registered: the paper's letters may be written small."""
    return value.upper() if isinstance(value, str) and value not in GUIDANCE else value


def declared() -> Iterator[tuple[str, Any, str, Any]]:
    """Name, type, explanation and default of every option, as the settings declare them."""
    named = (
        "Named settings, rescaled to this model (see `convergeflow list presets`), or a file of `convergeflow tune`."
    )
    yield "preset", str, named, None
    hints = typing.get_type_hints(Settings, include_extras=True)
    for control in fields(Settings):
        if control.name == "controls":
            over_time = "Strength over time of all controls: A constant, B /(1+sqrt(sigma/alpha)), C /(1+sigma/alpha)."
            yield "schedule", str, over_time, "A"
            yield from _of(Controls)
        elif control.name == "freeze":
            yield "freeze", bool, typing.get_args(hints["freeze"])[1], False
            yield from _of(Freeze, "freeze_")
        else:
            kind, words = typing.get_args(hints[control.name])
            yield control.name, kind, words, control.default


def _of(settings: type[Any], prefix: str = "") -> Iterator[tuple[str, Any, str, Any]]:
    hints = typing.get_type_hints(settings, include_extras=True)
    for control in fields(settings):
        kind, words = typing.get_args(hints[control.name])
        yield prefix + control.name, kind, words, control.default
