"""The configuration of a system: one frozen dataclass per method, and its config.json.

Keys of config.json that a configuration does not know (other tools add some) are ignored; keys that are not there have
their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from convergeflow import files
from convergeflow.errors import UserError, unknown_name
from convergeflow.model import SIZES
from convergeflow.model.backbone import TrunkShape

CONFIG_FILE = "config.json"
MOST = {
    "vocabulary": 1 << 22,
    "width": 1 << 16,
    "depth": 1 << 10,
    "heads": 1 << 10,
    "condition_width": 1 << 16,
    "length": 1 << 20,
}
"""No network is larger than this in any direction: beyond it a number is a mistake, or meant to exhaust a machine."""


@dataclass(frozen=True)
class SystemConfig(TrunkShape):
    """The shape of a system. A field that a method adds to it is an option of `train` for that method."""

    not_chosen: ClassVar[tuple[str, ...]] = ("vocabulary", "length")
    """Fields that the corpus or the training decide, and no recipe."""

    length: int = 1024

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
            if getattr(self, name) > most:
                raise UserError(f"{name} must be at most {most:,}, not {getattr(self, name)}")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout must be at least 0 and less than 1, not {self.dropout}")
        super().__post_init__()

    @classmethod
    def of_size(cls, size: str, **changes: Any) -> Self:
        """A named size: test, small, base (the paper's) or large."""
        if size not in SIZES:
            raise unknown_name("size", size, SIZES)
        return cls(**{**SIZES[size], **changes})

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The fields that a recipe may give under `model`."""
        return tuple(field.name for field in fields(cls) if field.name not in cls.not_chosen)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: object = CONFIG_FILE) -> Self:
        """From the values of a config.json, with their types checked; `source` is named in the error."""
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        try:
            checked: Self = files.check_type(known, cls)
        except UserError as wrong:
            raise UserError(f"{source} {wrong}") from None
        return checked

    def least_parameters(self) -> int:
        """Fewer numbers than any network of this size has: the layers' attention and MLP, and a row per token."""
        return self.depth * 4 * self.width * self.width + self.vocabulary

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; `from_dict` reads them back."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def read_config(folder: Path) -> dict[str, Any]:
    """The values of a folder's config.json, which name a `model_type`."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{folder} is not a checkpoint folder: it has no {CONFIG_FILE}")
    values = files.read_json(path)
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise UserError(f"{path} names no model_type")
    return values
