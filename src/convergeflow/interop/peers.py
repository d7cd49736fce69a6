"""Imports the published models of other projects: MDLM, Duo, SEDD, AR, FLM, FMLM, ELF and Plaid.

Sizes come from the project's own settings where the file has them, else from the tensors. What the file says it is must
agree with what was asked for. Names and shapes are checked one by one (`renaming`); nothing in a file is run
(`torch_file`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from convergeflow.errors import UserError, unknown_name
from convergeflow.interop.elf import elf_model
from convergeflow.interop.family import FAMILY, family_model
from convergeflow.interop.langflow import load_langflow
from convergeflow.interop.layouts import find
from convergeflow.interop.plaid import plaid_model
from convergeflow.interop.published import load_published
from convergeflow.systems.protocol import LanguageModel

PEERS = (*FAMILY, "elf", "plaid")
FLOWS = ("langflow", "convergeflow")
"""Projects whose network is ours under other names."""
WEIGHTS = ("ema", "raw")


@dataclass(frozen=True)
class Wanted:
    """What the user said about a checkpoint."""

    peer: str
    weights: str = "ema"
    revision: str | None = None
    length: int | None = None
    teacher: str | None = None
    """The FLM that a first-stage flow map corrects."""
    encoder: str | None = None
    """The T5 of ELF: a folder or a hub name."""


@dataclass(frozen=True)
class Imported:
    """A model and what a reader should know of where it came from."""

    model: LanguageModel
    layout: str
    remarks: list[str] = field(default_factory=list)


def load_peer(source: str | Path, wanted: Wanted) -> Imported:
    """The model of a checkpoint of `wanted.peer`; `source` is a file, a folder or a hub name."""
    if wanted.peer not in (*PEERS, *FLOWS):
        raise unknown_name("project", wanted.peer, [*PEERS, *FLOWS])
    if wanted.weights not in WEIGHTS:
        raise unknown_name("set of weights", wanted.weights, WEIGHTS)
    for option in ("teacher", "encoder"):
        if getattr(wanted, option) and wanted.peer != {"teacher": "fmlm", "encoder": "elf"}[option]:
            raise UserError(f"`{option}` does not belong to {wanted.peer}")
    if wanted.peer == "langflow":
        return Imported(load_langflow(source, revision=wanted.revision), "hub folder")
    if wanted.peer == "convergeflow":
        return Imported(load_published(source, weights=wanted.weights, length=wanted.length), "published file")
    found = find(source, revision=wanted.revision)
    remarks = []
    if found.aside:
        remarks.append(f"left out, as objects of other packages: {', '.join(sorted(found.aside))}")
    with torch.random.fork_rng(devices=[]):
        if wanted.peer in FAMILY:
            teacher = None if wanted.teacher is None else find(wanted.teacher)
            model, more = family_model(found, wanted.peer, wanted.weights, wanted.length, teacher)
            remarks += more
        elif wanted.peer == "elf":
            model = elf_model(found, wanted.weights, wanted.length, wanted.encoder)
        else:
            model = plaid_model(found, wanted.weights, wanted.length)
    return Imported(model.eval(), found.layout, remarks)
