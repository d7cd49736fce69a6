"""What the objective does: MSE against CE from one checkpoint, their crossover, a table learned with MSE (Section 4.2).

Continued training starts from the CE-trained model; the crossover exchanges the objectives half way. The last part lets
the table learn under MSE and watches it collapse, which is why the paper keeps it fixed.
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from convergeflow.evaluation.health import health
from convergeflow.results import figures
from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce import drawing, models
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.models import KeptModel
from convergeflow.studies.reproduce.registry import Experiment
from convergeflow.studies.reproduce.result import ExperimentResult, Record

SWITCHED = {"mse": "ce", "ce": "mse"}


def measure(experiment: Experiment, bench: Bench) -> tuple[list[Record], dict[str, Any]]:
    scale, start, runs = bench.scale, bench.start, train(bench)
    records = [_table(bench, start, 0), _sampled(bench, start, "start", 0)]
    half = scale.checkpoints // 2
    part = scale.continued_steps // scale.checkpoints
    learned_table = runs.pop("table")
    for name, run in runs.items():
        first = 1 if name in SWITCHED else half + 1
        records += [_sampled(bench, kept, name, number * part) for number, kept in enumerate(run, start=first)]
    for number, kept in enumerate(learned_table, start=1):
        records.append(_table(bench, kept, number * scale.collapse_steps // 4))
    return records, {"half": half * part, "real": bench.real_text()["values"]}


def train(bench: Bench) -> dict[str, list[KeptModel]]:
    """All models of the experiment by run: both objectives, each with the other one from half way on, the table."""
    store, scale, start = bench.store, bench.scale, bench.start
    half = scale.checkpoints // 2
    part = scale.continued_steps // scale.checkpoints
    runs = {}
    for objective, other in SWITCHED.items():
        run = models.continued(
            store, scale, f"continued-{objective}", start, objective, scale.continued_steps, scale.checkpoints
        )
        name = f"{objective}-then-{other}"
        runs[objective] = run
        runs[name] = models.continued(store, scale, name, run[half - 1], other, half * part, half)
    return {**runs, "table": models.learned_table_model(store, scale, start)}


def _sampled(bench: Bench, kept: KeptModel, run: str, step: int) -> Record:
    settings = Settings(nfe=bench.scale.objective_nfe)
    record = bench.measure(settings, kept=kept, label=f"{run} after {step} steps")
    return {**record, "curve": run, "step": step, "order": step}


def _table(bench: Bench, kept: KeptModel, step: int) -> Record:
    def compute() -> dict[str, Any]:
        found = health(kept.load().network.embedding.rows())
        return {**vars(found), "collapsed": found.collapsed}

    label = f"token table after {step} steps of MSE"
    record = bench.store.point("tables", {"model": kept.weights}, compute, label=label)
    return {**record, "curve": "table", "step": step, "order": step}


def draw(result: ExperimentResult) -> Figure:
    figure, axes = figures.panels(3, width=4.5)
    half = result.values["half"]
    styles = {"mse": (figures.COLOURS[0], "o", "MSE"), "ce": (figures.COLOURS[1], "s", "CE")}
    for run, (colour, marker, label) in styles.items():
        continued = [*result.curve("start"), *result.curve(run)]
        drawing.series(axes[0], continued, "step", "gen_ppl", color=colour, marker=marker, label=label)
        other = SWITCHED[run]
        switched = [r for r in continued if r["step"] == half] + result.curve(f"{run}-then-{other}")
        switched = [{**record, "after": record["step"] - half} for record in switched]
        look: dict[str, Any] = {"color": colour, "marker": marker, "label": f"{label}, then {styles[other][2]}"}
        drawing.series(axes[1], switched, "after", "gen_ppl", **look)
    for panel, title in zip(axes[:2], ("continued from one checkpoint", "objectives exchanged half way"), strict=True):
        figures.logarithmic(panel)
        panel.legend(loc="best")
        figures.label_axes(panel, "additional training steps", "Gen. PPL", f"{title} ({result.scale})")
    look = {"marker": "o", "color": figures.COLOURS[2], "label": "effective rank"}
    drawing.series(axes[2], result.curve("table"), "step", "effective_rank", **look)
    figures.logarithmic(axes[2])
    axes[2].axhline(1.0, color="grey", linestyle=":", linewidth=1, label="all tokens in one direction")
    figures.label_axes(axes[2], "training steps", "effective rank of the table", "table learned with MSE alone")
    axes[2].legend(loc="best")
    return figure
