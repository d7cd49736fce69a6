"""The configuration of a system: one frozen dataclass per method, and its config.json.

Keys of config.json that a configuration does not know (other tools add some) are ignored; keys that are not there have
their defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from convergeflow.errors import UserError, unknown_name
from convergeflow.model import SIZES
from convergeflow.model.backbone import TrunkShape

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class SystemConfig(TrunkShape):
    """The shape of a system. A field that a method adds to it is an option of `train` for that method."""

    not_chosen: ClassVar[tuple[str, ...]] = ("vocabulary", "length")
    """Fields that the corpus or the training decide, and no recipe."""

    length: int = 1024

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "depth", "heads", "condition_width", "length"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
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
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From the values of a config.json."""
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; `from_dict` reads them back."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def read_config(folder: Path) -> dict[str, Any]:
    """The values of a folder's config.json, which name a `model_type`."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{folder} is not a checkpoint folder: it has no {CONFIG_FILE}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{path} is not valid JSON") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise UserError(f"{path} names no model_type")
    return values
