"""The three scales at which every experiment runs: the same code, other sizes.

`test` trains tiny models on the spot and ends within minutes; its verdicts on language are not testable by design.
`embedded` uses the shipped stories checkpoint, whose text has exact scores. `paper` is OpenWebText with the checkpoint
that the paper starts from and GPT-2 Large as the scorer.
"""

from __future__ import annotations

from dataclasses import dataclass

from convergeflow.errors import unknown_name

SCALES = ("test", "embedded", "paper")
LANGUAGE_SCALES = ("embedded", "paper")
"""Scales whose models write language, so that claims about text can be tested."""


@dataclass(frozen=True)
class Scale:
    """Sizes of one scale."""

    name: str
    corpus: str
    """`stories` or the name of a corpus to prepare."""
    length: int
    """Tokens of a sample."""
    num_samples: int
    """Samples per point."""
    size: str
    """The network of every model that is trained here (`config.SIZES`)."""
    model: str | None
    """The model that is sampled: a shipped one, or one in the workspace; none: trained on the spot with MSE."""
    start: str | None
    """The CE-trained model (LangFlow) that training experiments start from, likewise; none: trained on the spot."""
    start_steps: int
    """CE steps of that model, where it is trained on the spot."""
    scorer: str
    """Who scores the samples: `exact`, or a causal language model."""
    budgets: tuple[int, ...]
    """NFE of the controls' curves: the first is drawn in the figures."""
    toy_trajectories: int
    toy_steps: tuple[int, ...]
    """Numbers of steps N at which the theorem's convergence is measured."""
    trace_sequences: int
    """Sequences whose distances to the embeddings are followed."""
    agreement_steps: tuple[int, ...]
    """Numbers of steps at which the token rules are compared."""
    shortcut_steps: tuple[int, ...]
    """Numbers of steps at which the previous-step shortcut is compared with explicit refinement."""
    scratch_steps: int
    """Training steps of each of the two models of the convergence study, from random init."""
    continued_steps: int
    """Training steps of the continued MSE and CE runs; the crossover goes on from half of them."""
    checkpoints: int
    """Evaluations of each continued run."""
    collapse_steps: int
    """Training steps with a table that is learned with MSE alone."""
    batch: int
    blocks: int
    """Training blocks of a corpus that is generated."""
    objective_nfe: int
    """NFE of the samples that judge the objectives."""

    @property
    def writes_language(self) -> bool:
        return self.name in LANGUAGE_SCALES


_SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            name="test",
            corpus="stories",
            length=32,
            num_samples=16,
            size="test",
            model=None,
            start=None,
            start_steps=150,
            scorer="exact",
            budgets=(64, 128),
            toy_trajectories=200,
            toy_steps=(16, 64, 512),
            trace_sequences=8,
            agreement_steps=(32, 64, 128),
            shortcut_steps=(8, 16, 32),
            scratch_steps=150,
            continued_steps=40,
            checkpoints=2,
            collapse_steps=120,
            batch=32,
            blocks=2000,
            objective_nfe=16,
        ),
        Scale(
            name="embedded",
            corpus="stories",
            length=64,
            num_samples=128,
            size="small",
            model="stories-small",
            start=None,
            start_steps=1200,
            scorer="exact",
            budgets=(64, 128),
            toy_trajectories=1000,
            toy_steps=(16, 64, 256, 1024, 8192),
            trace_sequences=16,
            agreement_steps=(32, 64, 128, 256, 512),
            shortcut_steps=(8, 16, 32, 64),
            scratch_steps=1500,
            continued_steps=600,
            checkpoints=4,
            collapse_steps=400,
            batch=32,
            blocks=50_000,
            objective_nfe=32,
        ),
        Scale(
            name="paper",
            corpus="owt",
            length=1024,
            num_samples=1024,
            size="base",
            model="convergeflow-owt",
            start="langflow-owt",
            start_steps=0,
            scorer="gpt2-large",
            budgets=(64, 128),
            toy_trajectories=10000,
            toy_steps=(16, 64, 256, 1024, 4096, 16384, 65536),
            trace_sequences=16,
            agreement_steps=(32, 64, 128, 256, 512),
            shortcut_steps=(16, 32, 64, 128, 256),
            scratch_steps=100_000,
            continued_steps=200_000,
            checkpoints=8,
            collapse_steps=10_000,
            batch=480,
            blocks=0,
            objective_nfe=64,
        ),
    )
}


def scale_by_name(name: str) -> Scale:
    if name not in _SCALES:
        raise unknown_name("scale", name, _SCALES)
    return _SCALES[name]
