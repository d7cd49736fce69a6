"""The models an experiment needs: found by name, or trained with the package's own trainer and kept in the store.

Training goes on from its newest checkpoint when it was stopped. At paper scale the same functions expect what
`convergeflow import` and `convergeflow train owt` made, as folders or links under models/ of the store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from convergeflow.data.corpus import Corpus
from convergeflow.data.prepare import prepare
from convergeflow.errors import UserError
from convergeflow.evaluation.reference import find_reference
from convergeflow.flow.schedule import schedule_from
from convergeflow.model.small_scale import Extras
from convergeflow.objective.losses import Loss
from convergeflow.randomness import RowDraws, derive_seed
from convergeflow.results.store import Missing, Store, digest
from convergeflow.studies.reproduce import team
from convergeflow.studies.reproduce.scale import ExperimentScale
from convergeflow.systems.convergeflow import ConvergeFlowConfig, ConvergeFlowModel
from convergeflow.training import checkpoint
from convergeflow.training.build import open_corpus, start_table
from convergeflow.training.config import (
    CorpusConfig,
    EmaConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    StageConfig,
    from_dict,
    resolve,
)
from convergeflow.training.run import FREE_ON_RESUME, HOW_IT_RUNS, make_accelerator
from convergeflow.training.trainer import Trainer
from convergeflow.zoo import load_model, locate, shipped_models, weights_hash

if TYPE_CHECKING:
    from convergeflow.studies.reproduce.registry import Experiment

FLOW_OPTIONS = ("condition_width", *(each.name for each in fields(Extras)))
"""What a recipe may change of the network beyond its size."""

CHECKPOINT_EVERY = 1000
"""Steps between two checkpoints, at most."""
GPUS_OF_THE_RECIPE = 8
"""With so many processes the recipe's slices fit into 40 GB; fewer of them take more slices."""
RAMP = 0.05
"""Share of a stage's steps over which its learning rate rises."""


@dataclass(frozen=True)
class KeptModel:
    """A model on disk."""

    name: str
    folder: Path
    weights: str
    """Hash of the weights: part of the key of everything that is measured on it."""

    def load(self) -> ConvergeFlowModel:
        model = load_model(self.folder)
        if not isinstance(model, ConvergeFlowModel):
            raise UserError(f"{self.name} is a model of {model.method}: the experiments sample a convergeflow model")
        return model


def corpus_for(store: Store, scale: ExperimentScale) -> Corpus:
    """The corpus of a scale; stories are written on the spot, others are those that their recipes train on."""
    if scale.corpus == "stories":
        # Who only reads the folder writes nothing into it.
        out = store.folder / "corpora" / f"stories-{scale.length}-{scale.sequences}" if store.measuring else None
        return prepare(
            "stories", out, length=scale.length, blocks=scale.sequences, heldout_blocks=max(256, scale.sequences // 25)
        )
    for folder in (Path(scale.corpus), store.folder / "corpora" / scale.corpus):  # named, or put there by hand
        if (folder / "manifest.json").is_file():
            return Corpus.open(folder)
    return open_corpus(resolve(scale.corpus), large=False)


def found(store: Store, name: str) -> KeptModel:
    """A model of the store or of the package, by name."""
    folder = store.model_folder(name)
    if not (folder / "config.json").is_file():
        if name not in shipped_models() and not Path(name).exists():
            raise UserError(
                f"no model {name!r}: put its checkpoint folder (or a link to it) at {folder}; shipped models: "
                f"{', '.join(shipped_models()) or 'none'}"
            )
        folder = locate(name)
    return KeptModel(name, folder, weights_hash(folder))


def scale_with(
    scale: ExperimentScale, name: str, experiments: Sequence[Experiment], say: Callable[[str], None]
) -> ExperimentScale:
    """The scale with another model to sample, on the text that it was trained for and of the length it learned."""
    for experiment in experiments:
        if "model" in experiment.changes.get(scale.name, {}):
            raise UserError(f"{experiment.name} has a model of its own at the scale {scale.name}: leave it out")
    model = KeptModel(name, locate(name), "").load()
    length = int(model.config.length)
    reference = find_reference(None, model.tokenizer, 2, length, say, trained_on=model.trained_on)
    if reference is None:
        raise UserError(
            f"no prepared corpus has the tokenizer of {name}: prepare its text first (convergeflow prepare)"
        )
    exact = reference.law is not None
    say(f"{name} is sampled on {reference.name}, {length} tokens, scored by {'exact' if exact else 'smollm2'}")
    corpus = "stories" if exact else str(reference.folder)
    return replace(scale, model=name, corpus=corpus, length=length, scorer="exact" if exact else "smollm2")


def start_model(store: Store, scale: ExperimentScale) -> KeptModel:
    """The CE-trained model (LangFlow's role): its table and weights are what the others start from."""
    if scale.start is not None:
        return found(store, scale.start)
    stages = [_stage("ce", "ce", scale.start_steps, lr=3e-3, learn_table=True, learn_schedule=True)]
    options = {}
    if scale.like == "embedded":
        # The shipped checkpoint's own first stage, so that this model is the one it came from.
        recipe = resolve(scale.corpus)
        first = [stage for stage in recipe.stages if stage.objective == "ce"]
        share = scale.start_steps, sum(stage.steps for stage in first)
        stages = [
            stage.model_copy(update={"steps": max(stage.warmup, stage.steps * share[0] // share[1])}) for stage in first
        ]
        options = {name: getattr(recipe.model.system, name) for name in FLOW_OPTIONS}
    return trained(store, scale, "start-ce", lambda: _fresh(store, scale, **options), stages)[-1]


def sampled_model(store: Store, scale: ExperimentScale) -> KeptModel:
    """The model whose samples are measured: ConvergeFlow, trained with MSE from the CE-trained one."""
    if scale.model is not None:
        return found(store, scale.model)
    start = start_model(store, scale)
    stage = _stage("mse", "mse", scale.start_steps // 2, lr=1e-3)
    return trained(store, scale, "convergeflow", start.load, [stage], parent=start)[-1]


def continued(
    store: Store, scale: ExperimentScale, name: str, parent: KeptModel, objective: str, steps: int, checkpoints: int
) -> list[KeptModel]:
    """A model trained on with one objective, as it is after each of `checkpoints` equal parts of `steps`."""
    lr = {"test": 1e-3, "embedded": 3e-4, "paper": 1e-5}[scale.like]
    parts = _parts(checkpoints, objective, steps, lr=lr, ramp=scale.name != "paper")
    return trained(store, scale, name, parent.load, parts, parent=parent)


def scratch_model(store: Store, scale: ExperimentScale, predictor: str, table: KeptModel, log_snr: float) -> KeptModel:
    """A model from random init with the given predictor, the fixed table of another, and a linear schedule."""

    def build() -> ConvergeFlowModel:
        # Gates opened at the start in place of a longer run; no other departure from the paper's network.
        gate = 0.0 if scale.name == "paper" else 0.5
        linear = {"kind": "linear"}
        model = _fresh(store, scale, table, CutLinear, predictor=predictor, schedule=linear, gate_init=gate)
        assert isinstance(model, CutLinear)
        model.last_time = float(schedule_from(linear).time_at(torch.tensor(log_snr)))
        return model

    paper = scale.name == "paper"
    stage = _stage("mse", "mse", scale.scratch_steps, lr=1e-4 if paper else 1e-3, ramp=not paper)
    return trained(store, scale, f"scratch-{predictor}", build, [stage], parent=table)[-1]


def learned_table_model(store: Store, scale: ExperimentScale, parent: KeptModel) -> list[KeptModel]:
    """A model whose table is trained along with everything else by MSE alone, from random init, in four parts."""
    # Fast enough that the table moves by its own size within the run.
    lr = {"test": 3e-2, "embedded": 1e-2, "paper": 1e-3}[scale.like]
    parts = _parts(4, "mse", scale.collapse_steps, lr=lr, learn_table=True, ramp=scale.name != "paper")
    return trained(store, scale, "learned-table", lambda: _fresh(store, scale, parent), parts, parent=parent)


class CutLinear(ConvergeFlowModel):
    """Trained up to a last time: under the linear schedule the loss weight (1 - t)^-2 has no bound towards t = 1."""

    last_time: float = 1.0

    def loss(self, tokens: Tensor, *, times: Tensor, draws: RowDraws) -> Loss:
        return super().loss(tokens, times=times * self.last_time, draws=draws)


def _fresh(
    store: Store,
    scale: ExperimentScale,
    table: KeptModel | None = None,
    kind: type[ConvergeFlowModel] = ConvergeFlowModel,
    **changes: Any,
) -> ConvergeFlowModel:
    """A model with random weights, and with the token table of another one if that is given."""
    corpus = corpus_for(store, scale)
    other = None if table is None else table.load()
    if other is not None:  # whose table fits a network of its own size
        changes = {**{name: getattr(other.config, name) for name in ("width", "depth", "heads")}, **changes}
    torch.manual_seed(derive_seed(0, "experiment"))
    config = ConvergeFlowConfig.of_size(
        scale.size, vocabulary=corpus.vocabulary, length=corpus.length, dropout=0.0, **changes
    )
    model = kind(config)
    total = corpus.manifest["splits"]["train"]["blocks"] * corpus.length
    model.set_unigram(torch.from_numpy(corpus.unigram * total))
    if other is not None:
        with torch.no_grad():
            model.network.embedding.weight.copy_(other.network.embedding.weight)
    elif scale.like == "embedded" and resolve(scale.corpus).table == "contexts":
        start_table(model, corpus)
    return model


def _stage(name: str, objective: str, steps: int, *, lr: float, ramp: bool = True, **changes: Any) -> StageConfig:
    """A stage whose rate rises at first, which a short run needs; the paper's runs have no warm-up."""
    warmup = round(RAMP * steps) if ramp else 0
    if changes.get("learn_schedule"):
        changes["schedule_lr"] = 10 * lr
    return StageConfig(name=name, objective=objective, steps=max(1, steps), lr=lr, warmup=warmup, **changes)  # type: ignore[arg-type]


def _parts(number: int, objective: str, steps: int, *, ramp: bool, **changes: Any) -> list[StageConfig]:
    """One run cut into equal stages, so that it is kept as it was after each."""
    return [
        _stage(f"part{index}", objective, steps // number, ramp=ramp and index == 0, keep_moments=index > 0, **changes)
        for index in range(number)
    ]


def run_config(scale: ExperimentScale, stages: list[StageConfig], world: int = 1) -> RunConfig:
    """A training run of a scale: the paper's is its recipe with other stages, small ones are simpler."""
    total, parts = sum(stage.steps for stage in stages), {stage.steps for stage in stages}
    corpus = CorpusConfig(name=scale.corpus, length=scale.length)
    model = ModelConfig.model_validate({"size": scale.size})
    if len(parts) == 1:
        # Every stage's end must be there afterwards: they are kept for good, beside the newest one.
        (part,) = parts
        every = next(part // cut for cut in range(1, part + 1) if part % cut == 0 and part // cut <= CHECKPOINT_EVERY)
        kept = {"checkpoint_every": every, "keep": 2, "keep_every": part}
    else:
        kept = {"checkpoint_every": min(parts), "keep": len(stages) + 1 + total // min(parts), "keep_every": 0}
    if scale.name == "paper":
        recipe = resolve("owt")
        rows = recipe.batch // (recipe.accumulate * GPUS_OF_THE_RECIPE)
        slices = (cut for cut in range(1, scale.batch + 1) if scale.batch % (world * cut) == 0)
        accumulate = next((cut for cut in slices if scale.batch // (world * cut) <= rows), 1)
        changes = {"batch": scale.batch, "accumulate": accumulate, "evaluate_every": 0}
        watched = {"sample_every": 0, "evaluate_blocks": 32, "sample_nfe": 4}
        return recipe.model_copy(
            update={"corpus": corpus, "model": model, "stages": tuple(stages), **changes, **watched, **kept}
        )
    return RunConfig(
        corpus=corpus,
        model=model,
        stages=tuple(stages),
        # The shipped checkpoint's optimizer where models must learn within minutes.
        optimizer=resolve(scale.corpus).optimizer if scale.like == "embedded" else OptimizerConfig(clip=1.0),
        batch=scale.batch,
        # A constant average forgets the start only after its horizon; small runs are shorter than that.
        ema=EmaConfig(decay=0.99),
        log_every=max(1, total // 20),
        evaluate_every=0,
        evaluate_blocks=32,
        sample_nfe=4,
        **kept,  # type: ignore[arg-type]
    )


def trained(
    store: Store,
    scale: ExperimentScale,
    name: str,
    build: Callable[[], ConvergeFlowModel],
    stages: list[StageConfig],
    *,
    parent: KeptModel | None = None,
) -> list[KeptModel]:
    """Train, or go on training, and keep the averaged model after every stage."""
    total, config = sum(stage.steps for stage in stages), run_config(scale, stages, team.size())
    made = {"model": name, "parent": None if parent is None else parent.weights}
    if not store.measuring:
        return _ends(store, name, _on_record(store, made, config))
    corpus = corpus_for(store, scale)
    key = {
        "model": name,
        # How it runs does not change what comes out.
        "run": {**config.to_dict(), **dict.fromkeys(HOW_IT_RUNS, "any")},
        "corpus": corpus.fingerprint,
        "parent": made["parent"],
    }
    # Another configuration is another run: it must not go on from this one's checkpoints.
    out = store.model_folder(f"{name}-{digest(key)[:8]}")

    def compute() -> dict[str, Any]:
        trainer = Trainer(config, build(), corpus, out, accelerator=make_accelerator(config))
        outcome = trainer.run(resume=(out / checkpoint.FOLDER).is_dir())
        if not outcome.finished:
            raise KeyboardInterrupt
        ends, steps = [], 0
        for stage in stages:
            steps += stage.steps
            folder = out / checkpoint.FOLDER / f"{checkpoint.PREFIX}{steps:08d}"
            ends.append(
                {"step": steps, "folder": str(folder.relative_to(store.folder)), "weights": weights_hash(folder)}
            )
        return {"ends": ends, "evaluation": outcome.evaluation}

    def whole(values: dict[str, Any]) -> bool:
        return all((store.folder / end["folder"] / "config.json").is_file() for end in values["ends"])

    record = team.point(store, "models", key, compute, label=f"training {name} ({total} steps)", usable=whole)
    return _ends(store, name, record)


def _ends(store: Store, name: str, record: dict[str, Any]) -> list[KeptModel]:
    return [KeptModel(name, store.folder / end["folder"], end["weights"]) for end in record["values"]["ends"]]


def _on_record(store: Store, made: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """The record of a training run, whose weights need not be there; `Missing` if there is none.

    Records of earlier versions count too: their configurations are compared as they would be written today, without
    what a run may change when it goes on.
    """
    wanted = _decisive(config)
    for path in sorted((store.folder / "records" / "models").glob(f"{made['model']}-*.json")):
        record = store.read(f"records/models/{path.name}")
        if record is None or any(record["key"][name] != value for name, value in made.items()):
            continue
        with contextlib.suppress(UserError):
            run = {name: value for name, value in record["key"]["run"].items() if name not in FREE_ON_RESUME}
            if _decisive(from_dict(run)) == wanted:
                return record
    raise Missing(made["model"])


def _decisive(config: RunConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in FREE_ON_RESUME}
