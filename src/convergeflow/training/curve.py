"""The learning curve of a run as a picture, drawn from its journal: training loss, held-out error at fixed noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from convergeflow import files
from convergeflow.errors import UserError
from convergeflow.training import journal


def draw_curve(run: Path, target: Path) -> None:
    """Loss per step (smoothed) with the stages marked, and the held-out numbers at fixed noise levels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if not (run / journal.FILE).is_file():
        raise UserError(f"{run} has no {journal.FILE}: give the folder of a training run")
    records = journal.read(run / journal.FILE)
    steps = [record for record in records if "loss" in record]
    checks = [(record["step"], record["evaluate"]) for record in records if "evaluate" in record]
    if not steps:
        raise UserError(f"the journal of {run} has no training step yet")
    names = [name for name in (checks[0][1] if checks else {}) if name.startswith(("ce@", "loss@"))]
    panels = 2 if names else 1
    figure, axes = pyplot.subplots(1, panels, figsize=(11 if names else 6, 4), constrained_layout=True, squeeze=False)
    _draw_losses(axes[0, 0], steps)
    if names:
        _draw_checks(axes[0, 1], checks, names)
    with files.replacing(target) as draft, open(draft, "wb") as file:
        figure.savefig(file, dpi=130, format="png")
    pyplot.close(figure)


def _draw_losses(axis: Any, steps: list[dict[str, Any]]) -> None:
    for number, stage in enumerate(dict.fromkeys(record["stage"] for record in steps)):
        part = [record for record in steps if record["stage"] == stage]
        smooth, value = [], journal.shown_loss(part[0])
        for record in part:
            value += (journal.shown_loss(record) - value) * 0.05
            smooth.append(value)
        axis.plot([record["step"] for record in part], smooth, color=f"C{number}", label=f"stage {stage}")
    axis.set_xlabel("step")
    axis.set_ylabel("training loss (running mean)")
    axis.set_title("Objectives differ between stages: compare within one", fontsize=10)
    axis.legend(frameon=False)


def _draw_checks(axis: Any, checks: list[tuple[int, dict[str, float]]], names: list[str]) -> None:
    for name in names:
        axis.plot([step for step, _ in checks], [values[name] for _, values in checks], marker="o", label=name)
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel("held-out cross-entropy (nats per token)")
    axis.set_title("At fixed noise levels gamma (averaged weights)", fontsize=10)
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
