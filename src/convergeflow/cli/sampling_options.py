"""The sampling options that generate, evaluate and sweep share, made from the controls that `Settings` declares.

`takes_sampling_options` adds them to a command, which receives them as one `SamplingOptions` and turns them into
`Settings` once the model, and with it the schedule, is known.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from convergeflow.cli import options
from convergeflow.errors import UserError
from convergeflow.systems.options import declared, settings_of, tuned

if typing.TYPE_CHECKING:
    from convergeflow.flow.schedule import Schedule
    from convergeflow.sampling.settings import Settings
    from convergeflow.systems.protocol import LanguageModel


@dataclass(frozen=True)
class _Given:
    """What the user gave, an attribute for each option; None means not given."""

    if typing.TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def settings(self, schedule: Schedule, default: str | None = None) -> Settings:
        """Checked settings for a model with this schedule and, if it has one, a preset of its own."""
        given = self.given()
        if self.grid is not None:
            given["grid"] = _grid(self.grid)
        if self.preset is not None and self.preset.endswith(".json"):
            given["preset"] = tuned(self.preset)
        return settings_of(given, schedule, default)

    def given(self) -> dict[str, Any]:
        """The options the user set."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value is not False}


def _options() -> Iterator[tuple[str, Any, Any]]:
    """Name, annotation for typer and default of every sampling option."""
    for name, kind, words, default in declared():
        if name == "freeze":
            yield name, Annotated[bool, typer.Option("--freeze", help=words)], False
            continue
        if name == "preset":
            words += " [default: the model's own, if it has one]"
        elif default is not None:
            words += f" [default: {default:g}]" if isinstance(default, float) else f" [default: {default}]"
        # Of several types the first is the one that can be typed: a name, a number.
        typed = (typing.get_args(kind) or (kind,))[0]
        yield name, Annotated[typed | None, typer.Option(help=re.sub(r"`(\w+)`", r"--\1", words))], None


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
    from convergeflow.systems.generation import check_budget

    check_budget(loaded, sampling.nfe)
    return loaded.sampling_arguments(sampling.given(), knobs, sampling.settings, length)


def _grid(value: str) -> str | tuple[float, ...]:
    if not value.endswith(".npy"):
        return value
    from convergeflow.cli.arrays import read_array

    return tuple(float(t) for t in read_array(Path(value)).reshape(-1))


takes_sampling_options = options.unfolded("sampling", SamplingOptions)
