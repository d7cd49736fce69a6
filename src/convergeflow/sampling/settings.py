"""How samples are made: the paper's controls and ours in one record, and presets of it.

Every control is declared here once (the three of the paper in `flow.guidance.Controls`), with the words that explain it
as its annotation; the command line makes its options from that. Nothing here loads torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from convergeflow.errors import UserError, unknown_name
from convergeflow.flow import SOLVERS
from convergeflow.flow.guidance import Controls
from convergeflow.kinds import Checked

if TYPE_CHECKING:
    from convergeflow.flow.schedule import Schedule
    from convergeflow.sampling.plan import Plan

SELF_CONDITIONS = ("recursive", "previous", "none")
RULES = ("weight", "prediction", "distance")
"""How tokens are read off at the end; see `decoding`."""


@dataclass(frozen=True)
class Freeze(Checked):
    """Stop computing what has converged.

    A position is settled when at `patience` grid points in a row its largest weight was at least `weight`, with one and
    the same token, and the guided prediction was as close to that token's embedding as such weights are, 2 (1 - weight)
    sqrt(width): under guidance the weights alone say little, for what drives the step lies beyond them. A settled
    position skips the head and moves with mu = its embedding; a sequence whose positions are all settled is finished
    and costs no further calls. At one grid point refinement is an iteration towards a fixed point: it ends for a
    sequence when all passes to come would move none of its conditions by more than `change` times sqrt(width), judged
    by the geometric series through its last two moves. A `change` of 0 always makes all the passes.
    """

    weight: Annotated[float, "A position is settled at this largest weight ..."] = 0.9999
    patience: Annotated[int, "... held by one token at this many steps in a row."] = 2
    change: Annotated[float, "Refinement ends once no condition would move by this part of sqrt(width)."] = 0.003

    def __post_init__(self) -> None:
        if not 0.5 < self.weight <= 1.0 or self.patience < 1 or not 0.0 <= self.change < 1.0:
            raise UserError("freezing needs a weight in (0.5, 1], a patience of at least 1 and a change in [0, 1)")


@dataclass(frozen=True)
class Settings(Checked):
    """How samples are made, apart from their seeds; an annotation explains each control."""

    nfe: Annotated[int, "Network calls per sample, spent exactly."] = 64
    controls: Controls = field(default_factory=Controls)
    self_condition: Annotated[
        str, "recursive (K + 1 calls a step), previous (last step's prediction, 1 call) or none (1 call)."
    ] = "recursive"
    grid: Annotated[
        str | tuple[float, ...], "midpoint, langflow, log-snr, closing, early, theorem, or a .npy file with times."
    ] = "midpoint"
    solver: Annotated[
        str,
        "euler, euler-noise, multistep (second order), heun, or kernel (between calls the exact kernel is followed, "
        "and on to the end).",
    ] = "euler"
    decode: Annotated[str, "Token rule: weight, prediction or distance."] = "weight"
    freeze: Annotated[Freeze | None, "Stop computing positions and sequences that have converged."] = None
    temperature: Annotated[
        float, "Below 1 sharpens the weights at every call, kernel included, w^(1/T): fewer errors, less variety."
    ] = 1.0
    base_temperature: Annotated[float, "The same for f alone, f^(1/T); the kernel stays exact."] = 1.0
    block: Annotated[
        int | None, "Tokens that are denoised together, for a model of blocks. [default: the model's longest]"
    ] = None

    def __post_init__(self) -> None:
        for kind, chosen, known in (
            ("self-conditioning", self.self_condition, SELF_CONDITIONS),
            ("token rule", self.decode, RULES),
            ("solver", self.solver, SOLVERS),
        ):
            if chosen not in known:
                raise unknown_name(kind, chosen, known)
        if self.self_condition != "recursive" and (self.controls.refine, self.controls.scg) != (1, 1.0):
            raise UserError(
                "`refine` and `scg` act on recursive self-conditioning only; drop them or `self_condition` "
                f"{self.self_condition}"
            )
        for name, value in (("temperature", self.temperature), ("base_temperature", self.base_temperature)):
            if not 1e-6 <= value <= 1e3:
                raise UserError(f"`{name}` must be a positive number, 0.000001 to 1000, not {value}; 1 changes nothing")
        if self.solver == "kernel" and self.freeze is not None:
            raise UserError("`freeze` is for solvers that stop at the grid's end: drop it or `solver` kernel")
        for name, count in (("nfe", self.nfe), ("block", self.block)):
            if count is not None and count < 1:
                raise UserError(f"`{name}` must be at least 1, not {count}")
        if not isinstance(self.grid, str):
            from convergeflow.flow.grid import check_grid

            check_grid(self.grid)

    def plan(self, schedule: Schedule) -> Plan:
        """Grid, coefficients, refinements and effective strengths for a schedule."""
        from convergeflow.sampling.plan import plan

        return plan(self, schedule)

    def describe(self) -> dict[str, Any]:
        """As JSON values; a temperature of 1, which is none, and no choice of a block are left out."""
        neutral = {"temperature": 1.0, "base_temperature": 1.0, "block": None}
        return {name: value for name, value in asdict(self).items() if name not in neutral or value != neutral[name]}


CONFIG_B = Controls.configuration("B", refine=25, scg=8.0)
PRESETS: dict[str, Settings] = {
    "standard": Settings(),
    "standard-code": Settings(),
    "standard-text": Settings(self_condition="previous"),
    "headline": Settings(controls=Controls.configuration("C", refine=100, scg=37.0)),
    "config-a": Settings(controls=Controls.configuration("A", refine=8, scg=1.5)),
    "config-b": Settings(controls=CONFIG_B),
    "config-c": Settings(controls=Controls.configuration("C", refine=100, scg=30.0)),
    "langflow": Settings(nfe=64, self_condition="previous", grid="langflow"),
    "sharp": Settings(controls=Controls.configuration("A", refine=8, scg=2.5), temperature=0.3),
    "clear": Settings(128, Controls(25, 8.0, 2.0, "B", "B", "C"), solver="multistep", temperature=0.92),
    "swift": Settings(nfe=8, grid="early", self_condition="previous", temperature=0.5),
    "words": Settings(nfe=127, self_condition="none", solver="kernel", base_temperature=0.92, block=1),
}
"""Settings by the paper's names, with its nominal strengths. `standard-code` and `standard-text` are the two readings
of its standard sampler: two passes at every step as in its code, or the previous step's prediction. Ours are `sharp`,
fewest errors and less variety, `clear` for natural text, `swift` for students, `words` for blocks of one token."""
