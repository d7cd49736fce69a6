"""The learning curve of a run as a picture, drawn from its journal: training loss, held-out error at fixed noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from convergeflow.errors import UserError

JOURNAL = "journal.jsonl"


def read_journal(run: Path) -> list[dict[str, Any]]:
    """All records of a run's journal; a torn last line is left out."""
    path = run / JOURNAL
    if not path.is_file():
        raise UserError(f"{run} has no {JOURNAL}: give the folder of a training run")
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def draw_curve(run: Path, target: Path) -> None:
    """Loss per step (smoothed) with the stages marked, and the held-out numbers at fixed noise levels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = read_journal(run)
    steps = [record for record in records if "loss" in record]
    checks = [(record["step"], record["evaluate"]) for record in records if "evaluate" in record]
    if not steps:
        raise UserError(f"the journal of {run} has no training step yet")
    names = [name for name in (checks[0][1] if checks else {}) if name.startswith(("ce@", "loss@"))]
    figure, axes = pyplot.subplots(1, 2 if names else 1, figsize=(11 if names else 6, 4), constrained_layout=True)
    left = axes[0] if names else axes
    for number, stage in enumerate(dict.fromkeys(record["stage"] for record in steps)):
        part = [record for record in steps if record["stage"] == stage]
        smooth, value = [], part[0]["loss"]
        for record in part:
            value += (record["loss"] - value) * 0.05
            smooth.append(value)
        left.plot([record["step"] for record in part], smooth, color=f"C{number}", label=f"stage {stage}")
    left.set_xlabel("step")
    left.set_ylabel("training loss (running mean)")
    left.set_title("Objectives differ between stages: compare within one", fontsize=10)
    left.legend(frameon=False)
    if names:
        for name in names:
            axes[1].plot([step for step, _ in checks], [values[name] for _, values in checks], marker="o", label=name)
        axes[1].set_yscale("log")
        axes[1].set_xlabel("step")
        axes[1].set_ylabel("held-out cross-entropy (nats per token)")
        axes[1].set_title("At fixed noise levels gamma (averaged weights)", fontsize=10)
        axes[1].legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(target, dpi=130)
    pyplot.close(figure)
