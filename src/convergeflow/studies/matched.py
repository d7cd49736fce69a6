"""Finished models at matched entropy: every model along its own controls, and a verdict for each against the first.

A model can be moved to almost any Gen. PPL by giving up entropy. So each is sampled at several settings, its Gen. PPL
is read at the data's entropy, and two models are compared there. Where one of them does not reach it, they are compared
at the entropy nearest to it that both reach; where there is none, nothing is said.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from convergeflow import files
from convergeflow.errors import UserError
from convergeflow.evaluation.estimate import Estimate, number
from convergeflow.evaluation.frontier import SAME, Crossing, Frontier, interpolate, undominated
from convergeflow.evaluation.scorers import Advance, silent
from convergeflow.results import pages
from convergeflow.results.draw import Measurer, origin
from convergeflow.results.record import frontier_of
from convergeflow.studies.systems import Setting, frontier
from convergeflow.systems.generation import calls_of
from convergeflow.systems.protocol import LanguageModel

LEAST = 0.02
"""Relative difference of Gen. PPL that counts, at least; as in the verdicts on the paper's claims."""
TRIAL, TRIAL_CALLS = 4, 4


@dataclass(frozen=True)
class Matched:
    """One model against the first of a list."""

    model: str
    against: str
    ratio: Estimate | None
    """Its Gen. PPL over the first one's."""
    at: str
    """The entropy at which it was read, in words."""
    verdict: str
    """better, worse, tie, or not comparable."""

    def describe(self) -> dict[str, Any]:
        """As JSON values."""
        ratio = {"value": None, "se": None, "n": 0} if self.ratio is None else self.ratio.describe()
        named = {"model": self.model, "against": self.against, "verdict": self.verdict}
        return {**named, **ratio, "at": self.at, "says": self.sentence()}

    def sentence(self) -> str:
        """For people."""
        if self.ratio is None:
            return f"{self.model} against {self.against}: {self.verdict} ({self.at})"
        share = number(self.ratio.value, self.ratio.se)
        return f"{self.model} has {share} of {self.against}'s Gen. PPL {self.at} (n {self.ratio.n}): {self.verdict}"


def settings_of(model: LanguageModel, nfe: int) -> list[Setting]:
    """The settings at which a model is sampled: those that the comparison of systems has for its method."""
    found = frontier(model.method, model, nfe)
    flow = model.as_flow()
    if flow is None:
        return found
    if getattr(model.config, "predictor", "weighted") != "weighted":  # no token weights to read or to cool
        plain = [setting for setting in found if setting.options["settings"].temperature == 1]
        found = [
            Setting(each.label, {"settings": replace(each.options["settings"], decode="prediction")}) for each in plain
        ]
    possible = []
    for setting in found:
        try:
            for piece in flow.pieces(setting.options["settings"], model.config.length):
                piece.settings.plan(flow.schedule)
        except UserError:
            continue  # a budget that this model cannot spend so
        possible.append(setting)
    return possible


def check_tokens(models: Mapping[str, LanguageModel]) -> None:
    """Refuse models of different tokens: the entropy of a text is counted in tokens."""
    first, *others = models
    ours = models[first].tokenizer
    for other in others:
        theirs = models[other].tokenizer
        if ours is None or theirs is None or ours.sha256 != theirs.sha256:
            raise UserError(f"{first} and {other} do not share a tokenizer: their entropies cannot be matched")


def seconds(models: Mapping[str, LanguageModel], nfe: int, num: int, length: int) -> dict[str, float]:
    """Time to sample each model, from a few trial samples."""
    found = {}
    for name, model in models.items():
        began = time.perf_counter()
        drawn = model.sample(TRIAL, length, seeds=range(TRIAL), nfe=TRIAL_CALLS)
        per_call = (time.perf_counter() - began) / TRIAL / drawn.nfe
        found[name] = per_call * calls_of(model, nfe, length) * num * len(settings_of(model, nfe))
    return found


def measure(
    measurer: Measurer, models: Mapping[str, LanguageModel], nfe: int, advance: Advance = silent
) -> Iterator[tuple[str, list[Any]]]:
    """The points of each model: (setting, record, file)."""
    for name, model in models.items():
        about = origin(name, model)
        label = name.replace("/", "-").strip(".-")
        yield (
            name,
            [
                (
                    setting.label,
                    *measurer.point(
                        f"{label}-nfe{nfe}",
                        model,
                        setting.options,
                        about=about,
                        key={"length": measurer.length},
                        label=f"{name}, {setting.label}",
                        advance=advance,
                    ),
                )
                for setting in settings_of(model, nfe)
            ],
        )


def against(curves: Frontier, first: str, other: str) -> Matched:
    """`other` against `first`, at the data's entropy or the nearest one that both reach."""
    entropy, entropy_se = curves.real["entropy"], curves.real.get("entropy_se") or 0.0
    at, pair = f"at the data's entropy {entropy:.3f}", [curves.crossing(name) for name in (other, first)]
    if any(crossing.gen_ppl is None for crossing in pair):
        ranges = [[point.entropy for point in undominated(curves.curves[name])] for name in (other, first)]
        if not all(ranges) or max(map(min, ranges)) > min(map(max, ranges)):
            shown = "; ".join(crossing.says for crossing in pair)
            return Matched(other, first, None, f"no entropy that both reach: {shown}", "not comparable")
        entropy = min(max(entropy, max(map(min, ranges))), min(map(max, ranges)))
        at, entropy_se = f"at entropy {entropy:.3f}, the nearest to the data's that both reach", 0.0
        pair = [interpolate(curves.curves[name], entropy, entropy_se) for name in (other, first)]
    ratio = _ratio(pair[0], pair[1], sum(curves.curves[name][0].n for name in (other, first)))
    resolution = max(LEAST, SAME * ratio.se)
    verdict = "tie" if not abs(ratio.value - 1) > resolution else "better" if ratio.value < 1 else "worse"
    return Matched(other, first, ratio, at, verdict)


def _ratio(one: Crossing, other: Crossing, n: int) -> Estimate:
    assert one.gen_ppl is not None and other.gen_ppl is not None
    value = one.gen_ppl / other.gen_ppl
    error = math.hypot(*((each.se or 0.0) / (each.gen_ppl or 1.0) for each in (one, other)))
    return Estimate(value, value * error, n)


COLUMNS = ("model", "NFE", "n", "points", "Gen. PPL at data entropy", "entropy there", "entropies of its points")


def rows(curves: Frontier) -> list[dict[str, Any]]:
    """One row per model, as JSON values."""
    found = []
    for name, points in curves.curves.items():
        entropies = [point.entropy for point in points]
        found.append(
            {
                "model": name,
                "nfe": points[0].nfe,
                "n": points[0].n,
                "points": len(points),
                "at_data_entropy": curves.crossing(name).describe(),
                "entropies": [min(entropies), max(entropies)],
            }
        )
    return found


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row in words."""
    at, (low, high) = row["at_data_entropy"], row["entropies"]
    there = "-"
    if at["gen_ppl"] is not None:
        there = "the data's" if at["gap"] == 0 else f"{at['gap']:+.3f} nat" + (" (tie)" if at["tie"] else "")
    shown = "never there" if at["gen_ppl"] is None else number(at["gen_ppl"], at["se"])
    numbers = [str(row[name]) for name in ("nfe", "n", "points")]
    return [row["model"], *numbers, shown, there, f"{low:.3f} to {high:.3f}"]


def write_matched(measurer: Measurer, points: Mapping[str, Sequence[Any]], nfe: int) -> dict[str, Any]:
    """compare.json, compare.md and the frontier in the measurer's folder; returns what compare.json holds."""
    folder = measurer.store.folder
    curves = frontier_of(f"Models at {nfe} network calls", "setting", dict(points), command=measurer.command)
    first, *others = curves.curves
    listed, verdicts = rows(curves), [against(curves, first, other) for other in others]
    summary = {
        "kind": "matched",
        "format": 1,
        "nfe": nfe,
        "rows": listed,
        "verdicts": [verdict.describe() for verdict in verdicts],
        "command": measurer.command,
        "frontier": curves.describe(),
    }
    lines = [
        "# Models at matched entropy",
        "",
        f"{nfe} network calls, scorer {curves.scorer}, protocol {curves.protocol}.",
    ]
    lines += ["", *pages.markdown_table(COLUMNS, [cells(row) for row in listed]), ""]
    lines += [f"- {verdict.sentence()}" for verdict in verdicts]
    lines += ["", "![frontiers](frontier.png)", "", f"Errors are standard errors over samples. {_HOW}", ""]
    files.write_json(folder / "compare.json", summary)
    files.write_text(folder / "compare.md", "\n".join(lines))
    pages.write_frontier(curves, folder, "frontier")
    return summary


_HOW = (
    f"A difference counts if it is larger than {LEAST:.0%} and than two standard errors, else it is a tie; an entropy "
    "ties with the data's if it lies within two standard errors of it."
)
