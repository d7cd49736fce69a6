"""The smallest run that has everything, and what a command said."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from convergeflow.cli.main import main

RECIPE = (
    "test",
    "stages.0.steps=2",
    "stages.1.steps=2",
    "stages.0.warmup=0",
    "batch=4",
    "corpus.blocks=16",
    "corpus.heldout_blocks=4",
    "evaluate_blocks=2",
    "evaluate_every=0",
    "checkpoint_every=1",
    "sample_nfe=2",
    "device=cpu",
)
"""Four steps of the test recipe on sixteen sequences, with a checkpoint at each."""


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line of a refusal."""
        last = self.err.strip().splitlines()[-1] if self.err.strip() else ""
        assert "Traceback" not in self.err and "internal error" not in self.err, self.err
        return last


def run(capsys: pytest.CaptureFixture[str], *words: object) -> Outcome:
    capsys.readouterr()
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    return Outcome(code, said.out, said.err)
