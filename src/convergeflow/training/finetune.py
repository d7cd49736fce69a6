"""A model goes on learning from somebody's own text, with its own tokenizer: a short run of the trainer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.kinds import whole
from convergeflow.systems.protocol import LanguageModel
from convergeflow.training import run
from convergeflow.training.config import from_dict

START = "start"
"""The model that a run began with, inside the run's folder."""
TEXTS = "texts.jsonl"
WARMUP = 0.1
"""Share of the steps in which the rate rises."""


def finetune(
    model: LanguageModel,
    texts: str | Path | Sequence[str | Path],
    *,
    out: str | Path,
    steps: int = 300,
    lr: float = 2e-4,
    batch: int = 16,
    seed: int = 0,
    device: str = "auto",
) -> LanguageModel:
    """Train a copy of `model` on `texts` for some steps, into the folder of a run, and return it with averaged weights.

    `texts` are files or folders, as `convergeflow prepare` takes them, or the texts themselves. The token table and the
    noise schedule stay as they are. The last part of the text is held out, and the journal has its numbers.
    """
    out, steps, batch, seed = Path(out), whole("steps", steps, 1), whole("batch", batch, 1), whole("seed", seed, 0)
    if model.tokenizer is None:
        raise UserError("fine-tuning needs the model's tokenizer, and this checkpoint has none")
    run.refuse_other_files(out)
    paths = _paths(texts, out)
    model.save_pretrained(out / START)
    shape = {name: value for name, value in model.config.to_dict().items() if name in model.config.options()}
    stage = {"name": "finetune", "objective": "mse", "steps": steps, "lr": lr, "warmup": round(WARMUP * steps)}
    config = from_dict(
        {
            "corpus": {"paths": paths, "tokenizer": str(out / START), "length": model.config.length},
            "model": {"method": model.method, "size": None, **shape},
            "stages": [stage | {"lr_schedule": "linear", "lr_floor": 0.1, "self_condition": 0.5}],
            "optimizer": {"clip": 1.0},
            "batch": batch,
            "ema": {"decay": 0.99},
            "seed": seed,
            "device": device,
            "evaluate_every": max(1, steps // 4),
            "checkpoint_every": max(1, steps // 2),
        }
    )
    outcome = run.train(config, out, init_from=out / START)
    if not outcome.finished:
        raise ConvergeFlowError(f"the run in {out} stopped at step {outcome.step}: train it on with `resume`")
    return type(model).from_pretrained(out / run.MODEL_FOLDER).to(model.device)


def _paths(texts: str | Path | Sequence[str | Path], out: Path) -> list[str]:
    """Files to read: those that were named, or one that the texts are written to."""
    given: list[Any] = [texts] if isinstance(texts, str | Path) or not isinstance(texts, Iterable) else list(texts)
    if not given or not all(isinstance(one, str | Path) for one in given):
        raise UserError("fine-tuning needs text: give files, folders or texts")
    if all(_is_file(one) for one in given):
        return [str(one) for one in given]
    for one in given:
        if isinstance(one, Path) or not one.strip() or len(one.split()) == 1:
            raise UserError(f"{str(one)!r} is neither a file or folder that exists nor a text")
    out.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": str(one)}, ensure_ascii=False) for one in given)
    (out / TEXTS).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [str(out / TEXTS)]


def _is_file(one: str | Path) -> bool:
    try:
        return bool(str(one).strip()) and Path(one).exists()  # an empty text is not the present folder
    except OSError:  # a text is too long for a name
        return False
