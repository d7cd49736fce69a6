"""What the objective does: MSE against CE from one checkpoint, their crossover, a table learned with MSE (Section 4.2).

Continued training starts from the CE-trained model; the crossover exchanges the objectives half way. The last part lets
the table learn under MSE and watches it collapse, which is why the paper keeps it fixed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from convergeflow.evaluation.estimate import Estimate
from convergeflow.model.embedding import health
from convergeflow.sampling.settings import Settings
from convergeflow.studies.reproduce import models, plotting, trade_off
from convergeflow.studies.reproduce.bench import Bench
from convergeflow.studies.reproduce.models import Kept
from convergeflow.studies.reproduce.registry import Claim, Cost, Experiment, Result, Table
from convergeflow.studies.reproduce.scale import Scale
from convergeflow.studies.reproduce.trade_off import gen_ppl_below, language_claim
from convergeflow.studies.reproduce.verdict import Judgement, decide, equal, measured
from convergeflow.studies.reproduce.workspace import Workspace

SWITCHED = {"ce": "mse", "mse": "ce"}


def measure(workspace: Workspace, scale: Scale) -> Result:
    bench = Bench(workspace, scale)
    start = models.start_model(workspace, scale)
    records = [_sampled(bench, start, "start", 0)]
    half = scale.checkpoints // 2
    part = scale.continued_steps // scale.checkpoints
    for objective in ("mse", "ce"):
        run = models.continued(
            workspace, scale, f"continued-{objective}", start, objective, scale.continued_steps, scale.checkpoints
        )
        for number, kept in enumerate(run, start=1):
            records.append(_sampled(bench, kept, objective, number * part))
        other = SWITCHED[objective]
        switched = models.continued(
            workspace, scale, f"{objective}-then-{other}", run[half - 1], other, half * part, half
        )
        for number, kept in enumerate(switched, start=1):
            records.append(_sampled(bench, kept, f"{objective}-then-{other}", (half + number) * part))
    for number, kept in enumerate(models.learned_table_model(workspace, scale, start), start=1):
        records.append(_table(workspace, kept, number * scale.collapse_steps // 4))
    records.insert(0, _table(workspace, start, 0))
    return Result("objectives", scale.name, records, {"half": half * part, "real": bench.real_text()["values"]})


def _sampled(bench: Bench, kept: Kept, run: str, step: int) -> dict[str, Any]:
    settings = Settings(nfe=bench.scale.objective_nfe)
    record = bench.measure(settings, kept=kept, label=f"{run} after {step} steps")
    return {**record, "part": "samples", "run": run, "step": step}


def _table(workspace: Workspace, kept: Kept, step: int) -> dict[str, Any]:
    def compute() -> dict[str, Any]:
        found = health(kept.load().network.embedding.rows())
        return {**vars(found), "collapsed": found.collapsed}

    record = workspace.point("tables", {"model": kept.weights}, compute, label=f"token table after {step} steps of MSE")
    return {**record, "part": "table", "step": step}


def _run(result: Result, name: str) -> list[dict[str, Any]]:
    return sorted((r for r in result.records if r.get("run") == name), key=lambda record: record["step"])


def _gen_ppl(record: dict[str, Any]) -> Estimate:
    return measured(record["values"], "gen_ppl")


def _mse_wins(result: Result) -> Judgement:
    return gen_ppl_below(
        _run(result, "mse")[-1],
        _run(result, "ce")[-1],
        what="Gen. PPL at the end, MSE against CE",
        paper="a clear advantage throughout training",
    )


def _mse_improves(result: Result) -> Judgement:
    return gen_ppl_below(
        _run(result, "mse")[-1],
        _run(result, "start")[0],
        what="Gen. PPL, MSE at the end against the start",
        paper="steadily reduced",
    )


def _ce_stays(result: Result) -> Judgement:
    return equal(
        _gen_ppl(_run(result, "ce")[-1]),
        _gen_ppl(_run(result, "start")[0]),
        tolerance=0.1,
        what="Gen. PPL, CE at the end against the start",
        paper="near its initial value",
    )


def _to_mse(result: Result) -> Judgement:
    return gen_ppl_below(
        _run(result, "ce-then-mse")[-1],
        _at_half(result, "ce"),
        what="Gen. PPL after the switch CE -> MSE against before",
        paper="reduced consistently",
    )


def _to_ce(result: Result) -> Judgement:
    return gen_ppl_below(
        _at_half(result, "mse"),
        _run(result, "mse-then-ce")[-1],
        what="Gen. PPL before the switch MSE -> CE against after",
        paper="degraded",
    )


def _at_half(result: Result, run: str) -> dict[str, Any]:
    return next(record for record in _run(result, run) if record["step"] == result.values["half"])


def _tables(result: Result) -> list[dict[str, Any]]:
    return sorted((r for r in result.records if r["part"] == "table"), key=lambda record: record["step"])


def _collapses(result: Result) -> Judgement:
    first, last = _tables(result)[0]["values"], _tables(result)[-1]["values"]
    gone = last["effective_rank"] < 0.5 * first["effective_rank"]
    return Judgement(
        decide(gone, resolved=True),
        f"effective rank {first['effective_rank']:.1f} -> {last['effective_rank']:.1f}, largest cosine of two tokens "
        f"{first['largest_cosine']:.3f} -> {last['largest_cosine']:.4f}",
        "degenerate solutions exist; the table is kept fixed",
    )


def draw(result: Result, folder: Path) -> list[Path]:
    figure, axes = plotting.panels(3, width=4.5)
    start = _run(result, "start")
    half = result.values["half"]
    styles = {"mse": (plotting.COLOURS[0], "o", "MSE"), "ce": (plotting.COLOURS[1], "s", "CE")}
    for run, (colour, marker, label) in styles.items():
        _line(axes[0], [*start, *_run(result, run)], 0, colour, marker, label)
        other = SWITCHED[run]
        name = f"{run}-then-{other}"
        before = _at_half(result, run)
        _line(axes[1], [before, *_run(result, name)], half, colour, marker, f"{label}, then {styles[other][2]}")
    for panel, title in zip(axes[:2], ("continued from one checkpoint", "objectives exchanged half way"), strict=True):
        panel.set_yscale("log")
        trade_off.plain_logarithm(panel)
        panel.legend(loc="best")
        plotting.label_axes(panel, "additional training steps", "Gen. PPL", f"{title} ({result.scale})")
    tables = _tables(result)
    steps = [record["step"] for record in tables]
    axes[2].plot(
        steps,
        [record["values"]["effective_rank"] for record in tables],
        "o-",
        color=plotting.COLOURS[2],
        label="effective rank",
    )
    axes[2].set_yscale("log")
    trade_off.plain_logarithm(axes[2])
    axes[2].axhline(1.0, color="grey", linestyle=":", linewidth=1, label="all tokens in one direction")
    plotting.label_axes(axes[2], "training steps", "effective rank of the table", "table learned with MSE alone")
    axes[2].legend(loc="best")
    return plotting.save(figure, folder, "objectives")


def _line(panel: Any, records: list[dict[str, Any]], shift: int, colour: str, marker: str, label: str) -> None:
    panel.errorbar(
        [record["step"] - shift for record in records],
        [record["values"]["gen_ppl"] for record in records],
        yerr=[record["values"]["gen_ppl_se"] for record in records],
        color=colour,
        marker=marker,
        capsize=2,
        label=label,
    )


def tabulate(result: Result) -> list[Table]:
    rows = [
        (
            r["run"],
            r["step"],
            r["values"]["gen_ppl"],
            r["values"]["gen_ppl_se"],
            r["values"]["entropy"],
            r["values"].get("valid"),
        )
        for r in result.records
        if r["part"] == "samples"
    ]
    tables = [
        (r["step"], r["values"]["effective_rank"], r["values"]["largest_cosine"], r["values"]["nearest_distance"])
        for r in _tables(result)
    ]
    return [
        Table("Gen. PPL along continued training", ("run", "steps", "PPL", "±", "H", "valid"), rows),
        Table(
            "The table when it is learned with MSE alone",
            ("steps", "effective rank", "largest cosine", "smallest distance / sqrt d"),
            tables,
        ),
    ]


_FIGURE = "Section 4.2, Figure 3"
EXPERIMENT = Experiment(
    name="objectives",
    reference="Section 4.2 and its figure; Section 3.1 (collapse)",
    question="Is MSE the better objective to continue with, and what happens to a table that learns under it?",
    claims=(
        language_claim("mse-wins", "after the same steps MSE has the lower Gen. PPL", _FIGURE, _mse_wins),
        language_claim("mse-improves", "MSE training lowers Gen. PPL from the CE checkpoint", _FIGURE, _mse_improves),
        language_claim("ce-stays", "CE training does not improve on its own checkpoint", _FIGURE, _ce_stays),
        language_claim("to-mse", "switching CE to MSE lowers Gen. PPL", _FIGURE, _to_mse),
        language_claim("to-ce", "switching MSE to CE raises Gen. PPL", _FIGURE, _to_ce),
        Claim("collapse", "a table learned with MSE alone collapses", "Section 3.1", _collapses),
    ),
    cost={"test": Cost(20, 35), "embedded": Cost(28, 1100), "paper": Cost(28, 2_000_000)},
    measure=measure,
    draw_figures=draw,
    tabulate=tabulate,
)
