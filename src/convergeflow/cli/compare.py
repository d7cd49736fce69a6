"""`convergeflow compare`: systems, models or published weights by one protocol; a table, a figure, a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer

from convergeflow.cli import options
from convergeflow.errors import UserError


@dataclass(frozen=True)
class CompareOptions:
    """What was asked for. Each of the three jobs has some of it and refuses the rest."""

    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...|KEY=VALUE...",
            help="Finished models to compare, or changes to the recipe for all systems, as in batch=32.",
        ),
    ] = None
    corpus: Annotated[
        str,
        typer.Option(help="The recipe whose corpus, size and budget all share: stories, basic, sotu or a YAML file."),
    ] = "stories"
    systems: Annotated[
        str, typer.Option(help="all, or names separated by commas; see `convergeflow list methods`.")
    ] = "all"
    steps: Annotated[
        str | None,
        typer.Option(
            help="Training steps per system, in the recipe's proportions. Several, separated by commas, are compared "
            "one by one, and a page shows how the result changes; each system is then read only as far as to the "
            "settings that enclose the entropy of real text. [default: the recipe's]"
        ),
    ] = None
    nfe: Annotated[str, typer.Option(help="Network calls per sample, separated by commas.")] = "16,64"
    num: options.PerPoint = 128
    bound: Annotated[int, typer.Option(min=0, help="Draws per text of the likelihood bound; 0 leaves it out.")] = 8
    scorer: options.Scorer = ""
    protocol: options.OneProtocol = "ours-1"
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder; what is finished in it is kept, and several processes may work in it. "
            "[default: out/compare-CORPUS]"
        ),
    ] = None
    precision: options.Precision = None
    checkpoints: Annotated[
        str | None,
        typer.Option(help="Compare the checkpoints of a YAML table, without training; table1 is the paper's."),
    ] = None
    processes: Annotated[int, typer.Option(min=1, help="Processes that sample --checkpoints on this machine.")] = 1
    part: Annotated[
        str | None, typer.Option(help="Only draw the samples of part I/N of --checkpoints, as on one of N machines.")
    ] = None
    device: options.Device = "auto"
    fair: Annotated[
        bool,
        typer.Option(
            "--fair",
            help="Offer the recipe's extras to every system, choose each one's learning rate from --rates on a short "
            "pilot, and train the flows and AR from two seeds (of several --steps, with the most).",
        ),
    ] = False
    rates: Annotated[
        str | None,
        typer.Option(
            help="Multiples of the recipe's learning rates that --fair chooses from; with one of them there is no "
            "pilot. [default: 1,1/3,3]"
        ),
    ] = None
    force: options.Force = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only estimate the time.")] = False
    json: options.Json = False

    @property
    def models(self) -> list[str]:
        """Finished models among the words."""
        return [word for word in self.changes or () if "=" not in word or Path(word).exists()]

    @property
    def budgets(self) -> list[int]:
        """The numbers of network calls."""
        found = _whole_numbers("--nfe", self.nfe)
        if found[0] < 3:
            raise UserError("--nfe must be at least 3: some systems need two steps and a decoding")
        return found

    @property
    def lengths(self) -> list[int | None]:
        """The numbers of training steps, the smallest first; None is the recipe's own."""
        if self.steps is None:
            return [None]
        found = _whole_numbers("--steps", self.steps)
        if found[0] < 1:
            raise UserError("--steps must be at least 1")
        return list(found)

    @property
    def multiples(self) -> tuple[float, ...]:
        """Of the recipe's learning rates, in the order of trial."""
        from convergeflow.studies.fair import RATES

        if self.rates is None:
            return RATES
        if not self.fair:
            raise UserError("--rates belongs to --fair: add it, or leave --rates out")
        try:
            found = tuple(float(Fraction(part)) for part in self.rates.split(","))
        except (ValueError, ZeroDivisionError):
            raise UserError(f"--rates takes numbers such as 1,1/3,3, not {self.rates!r}") from None
        if min(found) <= 0 or len(set(found)) < len(found):
            raise UserError("--rates takes different numbers above 0")
        return found


def _whole_numbers(option: str, text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"{option} takes whole numbers separated by commas, not {text!r}") from None


@options.unfolded("asked", CompareOptions)
def compare(context: typer.Context, asked: CompareOptions) -> None:
    """Compare all systems at equal size, tokens and batch, with one scorer, and draw a frontier for each.

    Trains what is missing, samples every system along its own temperature or guidance at each NFE, and writes records,
    a figure per NFE, table.json and table.md. The time is estimated first; a stopped comparison goes on, and a system
    whose records are complete needs neither its weights nor new training.

    With finished models as arguments nothing is trained: each is sampled along its own controls with --nfe network
    calls (64 if that is not given), read at the entropy of real text, and judged against the first.

    Example:
      convergeflow compare stories-small runs/mine --num 256
      convergeflow compare --corpus stories --dry-run
      convergeflow compare --corpus stories --steps 1200 model.depth=4 --fair --num 64
      convergeflow compare --corpus basic --steps 125,250,500,1000 --fair --rates 1 --nfe 64 --dry-run
      convergeflow compare --corpus test --systems ar,mdlm,convergeflow --nfe 8 --num 8
      convergeflow compare --checkpoints table1 --dry-run
      convergeflow compare --checkpoints my-table.yaml --processes 4 --out out/table
    """
    from convergeflow.cli import checkpoints, compare_models, compare_systems

    given = {name for name in context.params if options.was_typed(context, name)}
    if asked.checkpoints is not None:
        checkpoints.compare_checkpoints(asked.checkpoints, asked, given)
    elif asked.processes > 1 or asked.part is not None:
        raise UserError("--processes and --part belong to --checkpoints")
    elif asked.models:
        compare_models.compare_models(asked.models, asked, given)
    else:
        compare_systems.compare_systems(asked)
