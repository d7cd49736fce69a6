"""What all published models share: the network as its authors wrote it, and their sampling settings by name.

A published model is imported, never trained here (`convergeflow import`). Calling it runs the authors' network:
`model(...)` returns what their code returns for the same inputs. Sampling goes the way of this package (a seed per
sample, counted network calls); `presets` hold the settings behind the numbers in the papers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from convergeflow.errors import unknown_name
from convergeflow.randomness import RowDraws
from convergeflow.systems.protocol import MakeSettings
from convergeflow.systems.rival import Rival, RivalConfig, Run, TokenNetwork

PRECISIONS = ("float64", "float32")
"""Of the random numbers: exact, or cut off at 1 - 2^-24 as where the authors drew them in single precision."""


class SinglePrecision(RowDraws):
    """Clocks with the resolution of float32: noise ends at 16.6 nats, so rare tokens lose their mass."""

    def __init__(self, draws: RowDraws) -> None:
        super().__init__([])
        self.device, self._draws = draws.device, draws

    def __len__(self) -> int:
        return len(self._draws)

    def uniform(self, *shape: int) -> Tensor:
        return self._draws.uniform(*shape)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._draws.normal(*shape, dtype=dtype)

    def log_exponential(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return self._draws.log_exponential(*shape, dtype=torch.float32).to(dtype)

    def select(self, rows: Sequence[int] | Tensor) -> RowDraws:
        return SinglePrecision(self._draws.select(rows))


class Published(Rival):
    """The part of a model's class that makes it a published one; stands before the method's class."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Name -> `nfe` and controls. `published` is the setting of the paper's own number."""

    def sampling_arguments(
        self, given: Mapping[str, Any], controls: Mapping[str, Any], settings: MakeSettings, length: int | None = None
    ) -> dict[str, Any]:
        """As for other systems, with the model's own presets under the option `preset`."""
        rest = dict(given)
        chosen: Mapping[str, Any] = {}
        if "preset" in rest:
            chosen = self.preset(rest.pop("preset"))
        rest.setdefault("nfe", chosen.get("nfe", 64))
        return {**chosen, **super().sampling_arguments(rest, controls, settings, length)}

    @classmethod
    def preset(cls, name: str) -> Mapping[str, Any]:
        """Arguments of `sample` by name."""
        if name not in cls.presets:
            raise unknown_name(f"preset of {cls.method}", name, cls.presets)
        return cls.presets[name]


PRECISE = {"precision": PRECISIONS}
"""The choices of `DrawsTokens`."""


class DrawsTokens(Published):
    """For methods that draw tokens: the control `precision`."""

    def generate_batch(self, run: Run, **controls: Any) -> Tensor:
        """The method's sampler with random numbers of a `precision`."""
        if controls.pop("precision") == "float32":
            run.draws = SinglePrecision(run.draws)
        return self.tokens_of(run, **controls)

    def tokens_of(self, run: Run, **controls: Any) -> Tensor:
        """The sampler itself: by default that of the method in this package."""
        return super().generate_batch(run, **controls)


class MaskedNetwork(TokenNetwork):
    """The authors' networks predict the mask too and throw it away; here it is kept with the weights, and cut off."""

    def __init__(self, config: RivalConfig) -> None:
        super().__init__(config, inputs=config.vocabulary + 1, outputs=config.vocabulary + 1)

    def whole(self, inputs: Tensor, level: Tensor) -> Tensor:
        """Logits of all tokens and of the mask, which is last."""
        return super().forward(inputs, level)

    def forward(self, inputs: Tensor, level: Tensor, positions: Tensor | None = None) -> Tensor:
        return super().forward(inputs, level, positions)[..., :-1]
