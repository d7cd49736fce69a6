"""The card of a trained model: what it is, what it was trained on, and the last numbers, in a page of Markdown."""

from __future__ import annotations

from convergeflow.data.corpus import Corpus
from convergeflow.markup import in_page
from convergeflow.model.network import Shape
from convergeflow.training.config import RunConfig

MEASURED = """Held-out numbers: `bound` is an estimate, with the standard error `bound_error`, of an upper bound on the
nats per token, `context_free` what word frequencies alone leave. The others are at fixed noise levels: `ce@g` in nats
per token at gamma = g, `mse@g` per dimension, `gain@g` = nats better than the best prediction without context."""
MEASURED_OF_STUDENT = """Distance to the teacher on held-out noises, over all steps of walks of n calls (`mse@n` per
dimension to the barycentre of a step, `ce@n` in nats per token to draws from its weights):"""


def write_card(
    config: RunConfig, corpus: Corpus, parameters: int, step: int, evaluation: dict[str, float] | None
) -> str:
    """The text of `card.md`."""
    method, model, name = config.model.method, config.model.system, in_page(corpus.name)
    head = f", {model.predictor} predictor" if isinstance(model, Shape) else ""
    stages = "\n".join(
        f"| {in_page(stage.name)} | {stage.objective} | {stage.steps} | {stage.lr:g} | "
        f"{'learned' if stage.learn_table else 'frozen'} | {'learned' if stage.learn_schedule else 'frozen'} |"
        for stage in config.stages
    )
    learned, measured = f"{method} on {name}", MEASURED
    if config.distill is not None:
        learned, measured = f"{method}: a student of {in_page(config.distill.teacher)}", MEASURED_OF_STUDENT
    numbers = "\n".join(f"| {in_page(key)} | {value:.4f} |" for key, value in (evaluation or {}).items())
    return f"""# {learned}

- {parameters:,} parameters: {model.depth} layers, width {model.width}, {model.heads} heads{head}
- corpus {name} (fingerprint {corpus.fingerprint}), sequences of {corpus.length} tokens
- {step} steps of {config.batch} sequences, seed {config.seed}, {config.optimizer.name}
- these are the averaged weights (decay {config.ema.decay}); `run.json` holds the whole configuration

| stage | objective | steps | learning rate | table | schedule |
|---|---|---|---|---|---|
{stages}

{measured}

| number | value |
|---|---|
{numbers}
"""
