"""The scales at which experiments run: the same code, other sizes.

`test` trains tiny models on the spot and ends within minutes; its claims about language are not measured, by design.
`embedded` uses the shipped stories checkpoint, whose text has exact scores. `paper` is OpenWebText with the checkpoint
that the paper starts from and GPT-2 Large as the scorer. `basic` is `embedded` on natural text, scored by SmolLM2, for
the experiments about the trade-off between quality and diversity; `basic-gentle` is the same with weaker guidance. The
sizes are in `scales.yaml`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from convergeflow.errors import UserError, unknown_name
from convergeflow.files import read_yaml

SCALES = ("test", "embedded", "paper")
"""The scales that descriptions of experiments know; another one takes what they say of one of these (`like`)."""


@dataclass(frozen=True)
class ExperimentScale:
    """Sizes of one scale."""

    name: str
    like: str
    """The scale whose points, costs and testable claims this one has; most often its own name."""
    experiments: tuple[str, ...]
    """Experiments of this scale; none named: all."""
    corpus: str
    """`stories`, `basic` or the name of a corpus to prepare."""
    length: int
    """Tokens of a sample."""
    num_samples: int
    """Samples per point."""
    part: int
    """Samples that are kept together: the share of a point that one process makes, and that a kill can cost."""
    size: str
    """The network of every model that is trained here (`config.SIZES`)."""
    model: str | None
    """The model that is sampled: a shipped one, or one in the store. None trains it on the spot with MSE."""
    start: str | None
    """The CE-trained model (LangFlow) that training starts from, found in the same way. None trains it on the spot."""
    start_steps: int
    """CE steps of that model, where it is trained on the spot."""
    scorer: str
    """Who scores the samples: `exact`, or a causal language model."""
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
    sequences: int
    """Training sequences of a corpus that is generated."""
    objective_nfe: int
    """NFE of the samples that judge the objectives."""
    strength: float = 1.0
    """Share of the paper's guidance strengths that is used: a young model breaks at the full ones."""


def read_data(name: str) -> dict[str, Any]:
    """A YAML file of this folder."""
    import yaml  # the loader in C, where it is built, takes a tenth of the time

    text = (resources.files("convergeflow.studies.reproduce") / name).read_text(encoding="utf-8")
    return dict(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


@cache
def scale_by_name(name: str) -> ExperimentScale:
    """A scale, or a user's YAML file with `like: SCALE` and the sizes that differ from it."""
    sizes = read_data("scales.yaml")
    changes: dict[str, Any] = {}
    if name.endswith((".yaml", ".yml")):
        name, changes = _changed(Path(name))
    if name not in sizes:
        raise unknown_name("scale", name, sizes)
    known = {**sizes.get(sizes[name].get("like"), {}), **sizes[name]}
    for key in changes.keys() - known.keys():
        raise unknown_name("size", key, known)
    chosen: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in {**known, **changes}.items()
    }
    return ExperimentScale(**{"name": name, "like": name, "experiments": (), **chosen})


def _changed(path: Path) -> tuple[str, dict[str, Any]]:
    """What a user's file of sizes is like, and the sizes that it changes."""
    try:
        changes = read_yaml(path)
        return str(changes.pop("like")), changes
    except (UserError, AttributeError, KeyError, TypeError):
        raise UserError(f"{path} is not a file of sizes: it needs `like: paper` and the sizes that differ") from None
