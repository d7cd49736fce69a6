"""The paper's three sampling controls and their time-adaptive strengths (Sec. 3.2, 4.3, 4.5).

| control | letter | formula | neutral value |
|---|---|---|---|
| self-conditioning guidance | w_scg | u + w_scg (mu(x, t, c) - u), u = mu(x, t, none) | 1 (0: no self-conditioning) |
| iterative refinement | K | the guided prediction is the next condition, K times | 1 |
| unconditional guidance | w_ug | the noise-form displacement times 1 + w_ug | 0 |

Each is constant (A), divided by 1 + sqrt(sigma/alpha) (B) or divided by 1 + sigma/alpha (C): weak in the noise, strong
near the data. Another package may add its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from convergeflow.errors import UserError, unknown_name
from convergeflow.kinds import Checked
from convergeflow.plugins import Registry

if TYPE_CHECKING:  # naming the controls must not load torch
    from torch import Tensor

    from convergeflow.flow.schedule import Coefficients, Schedule

_OF_THE_PAPER: dict[str, tuple[Callable[[Coefficients], Tensor], str]] = {
    "A": (lambda at: at.sigma.new_ones(at.sigma.shape), "constant strength"),
    "B": (lambda at: 1.0 / (1.0 + (at.sigma / at.alpha).sqrt()), "over 1 + sqrt(sigma/alpha): weaker in the noise"),
    "C": (lambda at: 1.0 / (1.0 + at.sigma / at.alpha), "over 1 + sigma/alpha: weakest in the noise"),
}
GUIDANCE: Registry[Callable[[Coefficients], Tensor]] = Registry("guidance schedule", "guidance", _OF_THE_PAPER)
"""The factor in (0, 1] by which a nominal strength is multiplied at a noise level."""


@dataclass(frozen=True)
class Controls(Checked):
    """Nominal strengths of the three controls and the configuration that adapts each; an annotation explains each."""

    refine: Annotated[int, "K: self-conditioned refinements per step."] = 1
    scg: Annotated[float, "w_scg: u + w (mu(c) - u); 1 is plain self-conditioning, 0 is none."] = 1.0
    ug: Annotated[float, "w_ug: the noise-form step times 1 + w; 0 is none."] = 0.0
    refine_schedule: Annotated[str, "Strength over time of `refine` alone: A, B or C."] = "A"
    scg_schedule: Annotated[str, "Strength over time of `scg` alone: A, B or C."] = "A"
    ug_schedule: Annotated[str, "Strength over time of `ug` alone: A, B or C."] = "A"

    def __post_init__(self) -> None:
        if not 0 <= self.refine <= 10_000:
            raise UserError(f"`refine` must be 0 or more, at most 10,000, not {self.refine}")
        for name, value in (("scg", self.scg), ("ug", self.ug)):
            if not 0 <= value <= 1e4:  # beyond it the state overflows
                raise UserError(f"`{name}` must be a finite number from 0 to 10,000, not {value}")
        for configuration in (self.refine_schedule, self.scg_schedule, self.ug_schedule):
            if configuration not in GUIDANCE:
                raise unknown_name("guidance schedule", configuration, GUIDANCE)

    @classmethod
    def configuration(cls, name: str, *, refine: int = 1, scg: float = 1.0, ug: float = 0.0) -> Controls:
        """All three controls under one configuration, as in the paper's Section 4.5."""
        return cls(refine, scg, ug, name, name, name)

    @property
    def conditions(self) -> bool:
        """Whether self-conditioned passes have any effect."""
        return self.refine > 0 and self.scg != 0.0


def effective_strengths(controls: Controls, at: Coefficients) -> tuple[Tensor, Tensor]:
    """(w_scg, w_ug) at each grid point."""
    w_scg = controls.scg * GUIDANCE[controls.scg_schedule](at)
    w_ug = controls.ug * GUIDANCE[controls.ug_schedule](at)
    return w_scg, w_ug


def rescaled(controls: Controls, reference: Schedule, schedule: Schedule, *, end: float) -> Controls:
    """The controls whose effective strengths at the last grid point `end` equal those under a reference schedule.

    Nominal strengths of B and C do not carry over between widths: the factor at the last point depends on sigma/alpha
    there. Each nominal value is multiplied by the ratio of the two factors.
    """
    import torch

    t = torch.tensor(end, dtype=torch.float64)
    there, here = reference(t), schedule(t)

    def ratio(configuration: str) -> float:
        return float(GUIDANCE[configuration](there) / GUIDANCE[configuration](here))

    return replace(
        controls,
        refine=round(controls.refine * ratio(controls.refine_schedule)),
        scg=controls.scg * ratio(controls.scg_schedule),
        ug=controls.ug * ratio(controls.ug_schedule),
    )
