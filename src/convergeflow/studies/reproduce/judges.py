"""The judges that descriptions of experiments name: each reads a result and comes to a verdict on one claim.

The arguments of a judge stand in the description, with the curves it compares and the words of its evidence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from convergeflow.evaluation.estimate import Floats
from convergeflow.evaluation.frontier import NEAR
from convergeflow.sampling.settings import Freeze
from convergeflow.studies.reproduce import paper as published
from convergeflow.studies.reproduce import trade_off, verdict
from convergeflow.studies.reproduce.result import ExperimentResult, Record
from convergeflow.studies.reproduce.verdict import (
    Judgement,
    absent,
    below,
    both,
    decide,
    equal,
    every,
    exactly,
    measured,
    not_measured,
    resolution,
    show,
)

Pair = tuple[str, str]
"""Two curves by name; the claim is about the first."""

# --------------------------------------------------------------------------- curves of Gen. PPL against entropy


def lowers(result: ExperimentResult, curves: list[str], number: str, what: str) -> Judgement:
    """The strongest setting of each curve has a lower Gen. PPL, or a lower entropy, than its weakest."""
    return every([_lowers(result, name, number) for name in result.curves(curves)], what=what)


def _lowers(result: ExperimentResult, curve: str, number: str) -> Judgement:
    records = result.curve(curve)
    first, last = records[0], records[-1]
    before, after = first["paper"][number], last["paper"][number]
    said = f"{before:.4g} -> {after:.4g}"
    if number == "entropy":
        what = f"entropy of '{curve}' in nats, strongest against weakest setting"
        return trade_off.entropy_below(last, first, what=what, paper=said, effect=after - before)
    what = f"Gen. PPL of '{curve}', strongest against weakest setting"
    return trade_off.gen_ppl_below(last, first, what=what, paper=said, effect=after / before - 1)


def lies_below(result: ExperimentResult, pairs: Sequence[Pair], what: str = "") -> Judgement:
    """The first curve of each pair has the lower Gen. PPL at equal entropy; `what` is needed for several pairs."""
    return _of_pairs(result, pairs, what, None)


def same_frontier(result: ExperimentResult, pairs: Sequence[Pair], what: str, tolerance: float) -> Judgement:
    """The two curves of each pair are one within the tolerance."""
    return _of_pairs(result, pairs, what, tolerance)


def _of_pairs(result: ExperimentResult, pairs: Sequence[Pair], what: str, tolerance: float | None) -> Judgement:
    found = []
    for left, right in _measured_pairs(result, pairs):
        records = result.curve(left), result.curve(right)
        ratio, how = trade_off.frontier_ratio(*records)
        theirs = trade_off.ratio_at_equal_entropy(*records, source="paper")
        said = "" if theirs is None else f"the paper's points: ratio {theirs.value:.3f}"
        evidence = f"Gen. PPL of '{left}' over '{right}' {how}"
        if ratio is None:
            found.append(not_measured(f"'{left}' and '{right}' share no range of entropy in this run", said))
        elif tolerance is None:
            effect = None if theirs is None else theirs.value - 1
            found.append(below(ratio, exactly(1.0), what=evidence, paper=said, effect=effect))
        else:
            found.append(equal(ratio, exactly(1.0), tolerance=tolerance, what=evidence, paper=said))
    return every(found, what=what) if what else found[0]


def _measured_pairs(result: ExperimentResult, pairs: Sequence[Pair]) -> list[Pair]:
    names = result.curves()
    return [(left, right) for left, right in pairs if left in names and right in names]


def not_outward(result: ExperimentResult, pairs: Mapping[str, Pair], what: str) -> Judgement:
    """The first curve of each pair (by a name for the evidence) does not lie below the second."""
    found = []
    for name, pair in pairs.items():
        if not _measured_pairs(result, [pair]):
            continue
        ratio, how = trade_off.frontier_ratio(result.curve(pair[0]), result.curve(pair[1]))
        if ratio is None:
            found.append(not_measured(f"the curves with {name} share no range of entropy in this run"))
            continue
        least = resolution(ratio, exactly(1.0))
        outward = ratio.value < 1.0 - least
        evidence = f"Gen. PPL with over without w_ug {how}, {name}: {show(ratio)}"
        # A run that cannot see a shift of a tenth cannot say that there is none.
        found.append(Judgement(decide(not outward, resolved=outward or least <= 0.1), evidence))
    return every(found, what=what)


def narrower_range(result: ExperimentResult, curves: list[str], narrow: str, broad: str, what: str) -> Judgement:
    """Of the curves, `narrow` covers a smaller range of entropy than `broad`."""
    ranges = {name: trade_off.spread(trade_off.curve_of(result.curve(name))) for name in curves}
    theirs = {name: trade_off.spread(trade_off.curve_of(result.curve(name), "paper")) for name in curves}
    shown, said = (
        ", ".join(f"{name.split()[0]} {value:.4f}" for name, value in each.items()) for each in (ranges, theirs)
    )
    apart = trade_off.together(_narrower, result.curve(broad), result.curve(narrow))
    assert apart is not None
    effect, noise = theirs[broad] - theirs[narrow], resolution(apart, exactly(0.0), relative=False)
    resolved, seen = abs(apart.value) > noise, absent(apart.value, effect, noise)
    apart_by = (
        f"{broad.split()[0]} less {narrow.split()[0]} {show(apart)} (noise by noise; this run resolves {noise:.4f})"
    )
    evidence = f"{what}: {shown} nats; {apart_by}"
    return Judgement(decide(apart.value > 0, resolved=resolved, seen=seen), evidence, said)


def _narrower(broad: Floats, narrow: Floats) -> float:
    return trade_off.spread(broad) - trade_off.spread(narrow)


def extreme(result: ExperimentResult, curves: list[str], first: str, number: str, end: str, what: str) -> Judgement:
    """Of the curves, `first` reaches the `lowest` or `highest` value of a number; Gen. PPL by its logarithm."""
    choose, sign = (min, 1) if end == "lowest" else (max, -1)
    column, unit = (trade_off.GEN_PPL, "of log Gen. PPL") if number == "gen_ppl" else (trade_off.ENTROPY, "nats")
    series = {name: result.curve(name) for name in [first, *result.curves(curves)]}

    def ahead(own: Floats, *others: Floats) -> float:
        """By how much the own curve's best point is beyond the best of the others."""
        return sign * float(choose(choose(curve[:, column]) for curve in others) - choose(own[:, column]))

    gap = trade_off.together(ahead, *series.values())
    assert gap is not None
    effect = ahead(*(trade_off.curve_of(records, "paper") for records in series.values()))
    noise = resolution(gap, exactly(0.0), relative=False)
    resolved, seen = abs(gap.value) > noise, absent(gap.value, effect, noise)
    best = {name: choose(records, key=lambda r: float(r["values"][number])) for name, records in series.items()}
    shown = ", ".join(f"{name.split(',')[0]} {show(measured(r['values'], number))}" for name, r in best.items())
    said = ", ".join(
        f"{name.split(',')[0]} {choose(record['paper'][number] for record in records):.4g}"
        for name, records in series.items()
    )
    tie = "" if resolved else f"; {first.split(',')[0]} and the next are a tie"
    apart = f"the gap to the next is {show(gap)} {unit} (noise by noise; this run resolves {noise:.2g})"
    return Judgement(decide(gap.value > 0, resolved=resolved, seen=seen), f"{what}: {shown}; {apart}{tie}", said)


def numbers(result: ExperimentResult) -> Judgement:
    """Every point equals the paper's: only the paper's own scale can say."""
    found = [
        equal(
            measured(record["values"], number),
            exactly(record["paper"][number]),
            what=f"{number} at {record['paper']['label']}",
        )
        for record in result.records
        for number in ("gen_ppl", "entropy")
    ]
    return every(found, what="points within 2 % of the paper's")


def beats_euler(result: ExperimentResult, solver: str, nfe: int) -> Judgement:
    """A solver has a lower Gen. PPL than Euler at the same NFE and equal entropy."""
    ours, euler = result.curve(f"{solver}, NFE {nfe}"), result.curve(f"euler, NFE {nfe}")
    # Where the solvers' entropies agree at each w_scg, equal w_scg is equal entropy, and every strength has its say.
    matched = all(trade_off.same_entropy(pair) for pair in zip(ours, euler, strict=True))
    ratio = (trade_off.paired_ratio(ours, euler) if matched else None) or trade_off.ratio_at_equal_entropy(ours, euler)
    if ratio is not None:
        return below(ratio, exactly(1.0), what=f"Gen. PPL of {solver} over euler at NFE {nfe} and equal entropy")
    left, right, gap = trade_off.nearest_ends(ours, euler)
    if abs(gap) > NEAR:
        return not_measured(f"{solver} and euler share no range of entropy at NFE {nfe} in this run")
    what = f"Gen. PPL of {solver} and euler at NFE {nfe} where their entropies are closest, {gap:+.3f} nat"
    return trade_off.gen_ppl_below(left, right, what=what)


# ------------------------------------------------------------------------------------------------ single points


def point_below(result: ExperimentResult, left: Pair, right: Pair, what: str, paper: str) -> Judgement:
    """One point, given as (curve, place), has a lower Gen. PPL than another."""
    return trade_off.gen_ppl_below(_at(result, *left), _at(result, *right), what=what, paper=paper)


def switch_helps(result: ExperimentResult, run: str, before: str, helps: bool, what: str, paper: str) -> Judgement:
    """A run that changed its objective half way ends below where it changed, and below the run that did not change.

    Without the second part a switch would be given credit for what more steps of the old objective do as well. With
    `helps` false the claim is that it ends above both.
    """
    end, found = _at(result, run, "last"), []
    for place, beside in (("half", "where it changed"), ("last", f"as many more steps of {before.upper()}")):
        pair = [end, _at(result, before, place)]
        left, right = pair if helps else reversed(pair)
        shown = f"the end against {beside}" if helps else f"{beside} against the end"
        found.append(trade_off.gen_ppl_below(left, right, what=f"{what}, {shown}"))
    return both(*found, paper=paper)


def point_equal(
    result: ExperimentResult, left: Pair, right: Pair, tolerance: float, what: str, paper: str
) -> Judgement:
    """Two points, given as (curve, place), have one Gen. PPL within the tolerance."""
    points = [_at(result, *place) for place in (left, right)]
    values = [measured(point["values"], "gen_ppl") for point in points]
    ratio = trade_off.paired_ratio(points[:1], points[1:])
    if ratio is None:
        return equal(*values, tolerance=tolerance, what=what, paper=paper)
    what = f"{what}: {show(values[0])} against {show(values[1])}; noise by noise"
    return equal(ratio, exactly(1.0), tolerance=tolerance, what=what, paper=paper)


def curve_below(result: ExperimentResult, left: str, right: str, number: str, what: str) -> Judgement:
    """The only point of one curve lies below the only point of another: Gen. PPL by its ratio, others in nats."""
    points = [measured(result.values_of(curve=name), number) for name in (left, right)]
    return below(*points, relative=number == "gen_ppl", what=what)


def _at(result: ExperimentResult, curve: str, place: str) -> Record:
    """The `first` or `last` point of a curve, or the one at `half` of the steps."""
    records = result.curve(curve)
    if place == "half":
        return next(record for record in records if record["step"] == result.values["half"])
    return records[0 if place == "first" else -1]


def points_below(result: ExperimentResult, left: str, right: str, each: str, what: str, paper: str) -> Judgement:
    """Every point of a curve has a lower Gen. PPL than the other curve's point; `each` names them in the evidence."""
    pairs = zip(result.curve(left), result.curve(right), strict=True)
    return every([trade_off.gen_ppl_below(a, b, what=each.format(**a)) for a, b in pairs], what=what, paper=paper)


def varies_less(result: ExperimentResult, left: str, right: str, number: str, what: str, paper: str) -> Judgement:
    """The range of a number along one curve is smaller than along another; Gen. PPL by its logarithm (0.1 is 10 %)."""
    column = trade_off.GEN_PPL if number == "gen_ppl" else trade_off.ENTROPY
    curves = [result.curve(name) for name in (left, right)]
    ranges = [f"{trade_off.spread(trade_off.curve_of(records), column):.4g}" for records in curves]
    apart = trade_off.together(lambda a, b: trade_off.spread(a, column) - trade_off.spread(b, column), *curves)
    assert apart is not None
    what = f"{what}: {ranges[0]} against {ranges[1]}; noise by noise"
    return below(apart, exactly(0.0), relative=False, what=what, paper=paper)


def largest(
    result: ExperimentResult, number: str, what: str, at_most: float | None = None, at_least: float | None = None
) -> Judgement:
    """The largest value of a number over all points that have it stays below a bound, or reaches one."""
    found = max(float(record["values"][number]) for record in result.records if number in record["values"])
    if at_most is not None:
        return verdict.at_most(found, at_most, what=what)
    assert at_least is not None
    return verdict.at_least(found, at_least, what=what)


def table_collapses(result: ExperimentResult, curve: str, paper: str) -> Judgement:
    """The effective rank of the token table falls to less than half along a curve."""
    first, last = (_at(result, curve, place)["values"] for place in ("first", "last"))
    return Judgement(
        decide(last["effective_rank"] < 0.5 * first["effective_rank"], resolved=True),
        f"effective rank {first['effective_rank']:.1f} -> {last['effective_rank']:.1f}, largest cosine of two tokens "
        f"{first['largest_cosine']:.3f} -> {last['largest_cosine']:.4f}",
        paper,
    )


# -------------------------------------------------------------------------------------- token rules and freezing


def rules_overlap(result: ExperimentResult, rule: str) -> Judgement:
    """Reading the same samples by another rule changes Gen. PPL by at most 5 %."""
    # The same samples are read twice: their own noise cancels, so the difference itself is what counts.
    curves = [[result.curve(name) for name in result.curves([f"{each}, NFE *"])] for each in (rule, "weight")]
    found = []
    for a, b in zip(*(itertools.chain(*series) for series in curves), strict=True):
        apart = a["values"]["gen_ppl"] / b["values"]["gen_ppl"] - 1
        shown = [show(measured(record["values"], "gen_ppl")) for record in (a, b)]
        evidence = f"by {rule} {shown[0]}, by weight {shown[1]} at w_scg = {a['scg']:g} ({apart:+.1%})"
        found.append(Judgement(decide(abs(apart) <= 0.05, resolved=True), evidence))
    return every(found, what="Gen. PPL of the two rules within 5 % on the same samples")


def rules_agree(result: ExperimentResult, rule: str) -> Judgement:
    """The rules agree at about as many positions as in the paper."""
    said = published.statements()
    series = result.curve("agreement")
    shown = ", ".join(f"N = {r['steps']}: {r['values'][rule]:.2%}" for r in series)
    return Judgement(
        decide(min(r["values"][rule] for r in series) >= said["agreement_low"] - 0.02, resolved=True),
        f"weight and {rule} rules agree: {shown}",
        f"{said['agreement_low']:.2%} to {said['agreement_high']:.2%} for N = 32 to 512",
    )


def agreement_grows(result: ExperimentResult, rule: str) -> Judgement:
    """The rules agree more often at the largest number of steps than at the smallest."""
    series = result.curve("agreement")
    first, last = measured(series[0]["values"], rule), measured(series[-1]["values"], rule)
    gap = last.value - first.value
    noise = 2 * math.hypot(first.se, last.se)
    both = min(first.value, last.value) >= 0.999
    shown = [f"{each.value:.2%} ± {each.se:.2%}" for each in (first, last)]
    return Judgement(
        decide(gap > 0, resolved=abs(gap) > noise) if not both else decide(True, resolved=gap >= 0),
        f"agreement of weight and {rule} from {shown[0]} at N = {series[0]['steps']} "
        f"to {shown[1]} at N = {series[-1]['steps']}",
        "rises with N",
    )


def freezing_saves(result: ExperimentResult, sampler: str, share: float) -> Judgement:
    """Freezing by its default criterion saves at least this share of the calls."""
    saved = result.values_of(curve=sampler, change=Freeze().change)["saved"]
    return verdict.at_least(saved, share, what=f"share of calls saved ({sampler}, default criterion)")


def freezing_keeps(result: ExperimentResult, sampler: str, share: float) -> Judgement:
    """Freezing by its default criterion changes at most this share of the tokens."""
    values = result.values_of(curve=sampler, change=Freeze().change)
    what = f"share of {values['positions']} tokens changed ({sampler}, default criterion)"
    return verdict.at_most(values["changed"], share, what=what)
