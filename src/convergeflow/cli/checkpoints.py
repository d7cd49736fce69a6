"""`convergeflow compare --checkpoints`: published weights under one protocol, each paper's claim beside the result."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convergeflow.cli.console import command_line, note, print_json, print_result, progress
from convergeflow.errors import ConvergeFlowError, UserError, unknown_name
from convergeflow.files import replacing_folder, write_json

if TYPE_CHECKING:
    from convergeflow.cli.compare import CompareOptions
    from convergeflow.studies.checkpoints import CheckpointStudy, Entry

ORIGIN = "origin.json"
"""Beside an imported model: where it came from."""
STARTED_BY = "CONVERGEFLOW_STARTED_BY"
"""Says in the environment which process started this one, and must be alive."""


def compare_checkpoints(table_file: str, asked: CompareOptions, given: Set[str]) -> None:
    """Import, estimate, sample in so many processes, score, and write the page."""
    for name in ("changes", "corpus", "steps", "nfe", "num", "bound", "scorer", "protocol", "force", "fair", "rates"):
        if name in given:
            raise UserError(f"`{name}` is for systems that are trained; with --checkpoints the table's file says it")
    rank, world = _part(asked.part)
    scoring = asked.part is None and not asked.dry_run
    study = _study(table_file, asked.out, asked.systems, asked.device, scoring=scoring)
    if asked.part is not None:
        _draw_here(study, rank, world)
        return
    for entry in study.table.entries:
        if entry.source is None:
            note(f"{entry.name}: left out, it has no hub name; give its file as `source` ({entry.remark})")
    if asked.dry_run:
        _foretell(study, asked)
        return
    _print_costs(study, asked.processes)
    if asked.processes == 1:
        _draw_here(study, 0, 1)
    else:
        _draw_in_processes(study, table_file, asked)
    from convergeflow.studies import checkpoint_page

    summary = checkpoint_page.write_page(study, list(study.rows()))
    note(f"wrote table.md, table.html, table.json and the frontier in {study.measurer.store.folder}")
    told = {name: summary[name] for name in ("title", "about", "rows", "left_out")}
    rows = [checkpoint_page.cells(row) for row in told["rows"]]
    print_result(told, checkpoint_page.COLUMNS, rows, as_json=asked.json)


def _foretell(study: CheckpointStudy, asked: CompareOptions) -> None:
    """The costs of what is on this machine: a dry run fetches nothing."""
    from convergeflow.systems.hub import without_network

    with without_network():
        study.table = replace(study.table, entries=[entry for entry in study.entries if _is_here(study, entry)])
        if not study.entries:
            raise UserError(
                "none of the table's models is on this machine, and --dry-run fetches nothing: leave it out to fetch "
                "them, or give their files as `source`"
            )
        _print_costs(study, asked.processes, as_json=asked.json)


def _is_here(study: CheckpointStudy, entry: Entry) -> bool:
    """Whether a model can be had without the network; says so if not."""
    try:
        study.folder(entry)
    except UserError:
        raise
    except ConvergeFlowError:
        note(f"{entry.name}: left out, {entry.source} is not on this machine, and --dry-run fetches nothing")
        return False
    return True


def _part(part: str | None) -> tuple[int, int]:
    if part is None:
        return 0, 1
    found = re.fullmatch(r"(\d+)/(\d+)", part)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--part takes I/N with I from 1 to N, not {part!r}")
    return int(found[1]) - 1, int(found[2])


def _study(table_file: str, out: Path | None, systems: str, device: str, *, scoring: bool) -> CheckpointStudy:
    from convergeflow.evaluation.assess import Assessor, assessor_for
    from convergeflow.evaluation.protocol import protocol_named
    from convergeflow.evaluation.reference import find_reference
    from convergeflow.results.draw import Measurer
    from convergeflow.results.store import Store
    from convergeflow.studies.checkpoints import CheckpointStudy, read_table

    table = read_table(table_file)
    if systems != "all":
        wanted = [name.strip() for name in systems.split(",")]
        known = {entry.name: entry for entry in table.entries}
        for name in wanted:
            if name not in known:
                raise unknown_name("system of the table", name, known)
        table = replace(table, entries=[known[name] for name in wanted])
    protocol = protocol_named(table.protocol)
    assessor: Any = None
    if scoring:  # a scorer takes long to load, and sampling needs none
        reference = None
        if table.corpus is not None:
            reference = find_reference(table.corpus, None, table.num, table.length, note)
        assessor = assessor_for(reference, table.scorer, device=device, say=note)
        assert isinstance(assessor, Assessor)
    store = Store(out or Path("out") / f"compare-{Path(table_file).stem}", note=note)
    measurer = Measurer(store, assessor, protocol, range(table.num), table.length, command=command_line())
    return CheckpointStudy(table, measurer, _fetch, device)


def _fetch(entry: Entry, folder: Path) -> None:
    """Import a checkpoint as `convergeflow import` does."""
    from convergeflow.cli.imported import give_tokenizer
    from convergeflow.interop.peers import Wanted, load_peer

    how = dict(entry.how)
    tokenizer = how.pop("tokenizer", None)
    model = load_peer(str(entry.source), Wanted(str(entry.project), **how)).model
    give_tokenizer(model, tokenizer, slack=1)
    with replacing_folder(folder) as draft:
        model.save_pretrained(draft)
        write_json(draft / ORIGIN, {"source": entry.source, "import": entry.project, **entry.how})


def _print_costs(study: CheckpointStudy, processes: int, *, as_json: bool = False) -> None:
    """Say what it will take."""
    from convergeflow.results.store import readable

    costs = study.costs()
    total = sum(cost.seconds for cost in costs) / processes
    if as_json:
        print_json({"seconds": total, "systems": [vars(cost) for cost in costs]})
        return
    for cost in costs:
        note(
            f"{cost.name:18} {cost.parameters:>12,} parameters, {cost.calls:,} network calls, about "
            f"{readable(cost.seconds)}"
        )
    shared = f" in {processes} processes" if processes > 1 else ""
    note(f"together about {readable(total)}{shared}, without scoring; a stopped table goes on where it was")


def _draw_here(study: CheckpointStudy, rank: int, world: int) -> None:
    parent = os.environ.get(STARTED_BY)
    with progress("sampling") as bar:

        def advance(done: int) -> None:
            bar.advance(done)
            if parent is not None and os.getppid() != int(parent):
                raise ConvergeFlowError("stopped, because the command that started this process has ended")

        study.advance = advance
        study.draw(rank, world)


def _draw_in_processes(study: CheckpointStudy, table_file: str, asked: CompareOptions) -> None:
    """The same command once per part; a failure of one ends the others."""
    from convergeflow.device import visible_to

    store = study.measurer.store
    command = [sys.executable, "-m", "convergeflow", "compare", "--checkpoints", table_file]
    command += ["--systems", asked.systems, "--out", str(store.folder), "--device", asked.device]
    command += [] if asked.precision is None else ["--precision", asked.precision]
    running = [
        subprocess.Popen(
            [*command, "--part", f"{rank + 1}/{asked.processes}"],
            env={**os.environ, STARTED_BY: str(os.getpid()), **visible_to(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(asked.processes)
    ]
    try:
        for process in running:
            _, said = process.communicate()
            if process.returncode != 0:
                last = (said.strip().splitlines() or ["no message"])[-1].removeprefix("error: ")
                raise ConvergeFlowError(f"a process failed: {last}; the same command goes on from there")
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
                process.wait()
