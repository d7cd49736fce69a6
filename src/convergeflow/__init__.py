"""Continuous flow language models whose samples converge to token embeddings.

    import convergeflow as cf

    model = cf.load("stories-small")
    samples = model.generate(num=4, seed=0)

`docs/api.md` explains every name below. Importing the package is cheap: what needs torch is loaded at its first use.
`paper.py` is the method on one page.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.interop.arrival import wait_for_transformers

if TYPE_CHECKING:
    import torch

    from convergeflow.data.tokenizer import Tokenizer
    from convergeflow.evaluation.reference import Reference
    from convergeflow.flow.guidance import Controls
    from convergeflow.flow.schedule import Cosine, Gumbel, Linear, Schedule
    from convergeflow.results.frames import Frame, Frames
    from convergeflow.results.trace import Trace
    from convergeflow.sampling.cohort import Step
    from convergeflow.sampling.settings import Freeze, Settings
    from convergeflow.systems.protocol import LanguageModel, Samples

    __version__: str

__all__ = [
    "Controls",
    "ConvergeFlowError",
    "Cosine",
    "Frame",
    "Frames",
    "Freeze",
    "Gumbel",
    "LanguageModel",
    "Linear",
    "Samples",
    "Schedule",
    "Settings",
    "Step",
    "Trace",
    "UserError",
    "__version__",
    "evaluate",
    "load",
    "preset",
    "train",
]

_HOMES = {
    "Controls": "flow.guidance",
    "Cosine": "flow.schedule",
    "Frame": "results.frames",
    "Frames": "results.frames",
    "Freeze": "sampling.settings",
    "Gumbel": "flow.schedule",
    "LanguageModel": "systems.protocol",
    "Linear": "flow.schedule",
    "Samples": "systems.protocol",
    "Schedule": "flow.schedule",
    "Settings": "sampling.settings",
    "Step": "sampling.cohort",
    "Trace": "results.trace",
}
"""Where the classes live, which are imported when they are first named."""


def load(
    model: str | Path = "stories-small",
    *,
    average: bool = True,
    device: str = "auto",
    dtype: torch.dtype | str | None = None,
) -> LanguageModel:
    """A model that is ready to generate, with its tokenizer and its own preset.

    `model` is the name of a shipped one, a checkpoint folder, a training run, or hf:owner/name for the hub. `average`
    takes the averaged weights if the folder has them. `device` is auto, cpu, cuda or mps; `dtype` float32 or float64.
    """
    from convergeflow.zoo import load_model

    return load_model(model, average=average, device=device, dtype=dtype)


def preset(name: str, model: LanguageModel | None = None, *, nfe: int | None = None) -> Settings:
    """Named sampling settings. With a `model` they are rescaled to its noise schedule, as the command line does.

    Without one they are the paper's own numbers. `nfe` changes the number of network calls.
    """
    from convergeflow.kinds import whole
    from convergeflow.sampling.plan import PAPER_SCHEDULE, preset_for

    nfe = None if nfe is None else whole("nfe", nfe, 1)
    if model is None:
        return preset_for(name, PAPER_SCHEDULE, nfe=nfe)
    if not hasattr(model, "as_flow"):
        raise UserError("`model` must be a loaded model, as load(...) gives it")
    flow = model.as_flow()
    if flow is None:
        raise UserError(f"presets are settings of flows; {model.method} has controls of its own")
    return preset_for(name, flow.schedule, nfe=nfe)


def train(
    recipe: str | Path, *, out: str | Path, resume: bool = False, init_from: str | Path | None = None, **overrides: Any
) -> LanguageModel:
    """Train a recipe (a name or a YAML file) into the folder `out`, and return the model with averaged weights.

    Overrides are the keys of the recipe: batch=32, model={"depth": 2}, stages={"ce": {"steps": 500}}. Ctrl-C saves a
    checkpoint and stops the run; with `resume` the same call goes on from it bit for bit.
    """
    import yaml

    from convergeflow.training import config as configuration

    changes = [f"{key}={yaml.safe_dump(_plain(value), default_flow_style=True)}" for key, value in _leaves(overrides)]
    config = configuration.resolve(str(recipe), changes)

    from convergeflow.training import run
    from convergeflow.zoo import locate

    out = Path(out)
    config = run.saved_config(out, wanted=config) if resume else config
    start = None if init_from is None else locate(init_from)
    outcome = run.train(config, out, resume=resume, init_from=start)
    if not outcome.finished:
        raise ConvergeFlowError(f"the run stopped at step {outcome.step}: call train again with `resume` to go on")
    return load(out, device=config.device)


def _leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _plain(value: Any) -> Any:
    """A value as YAML knows it: numbers of numpy and paths are none of its kinds."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value.tolist() if hasattr(value, "tolist") else value


def evaluate(
    model: str | Path | LanguageModel | Samples,
    *,
    num: int = 128,
    seed: int = 0,
    scorer: str | None = None,
    protocol: str = "ours-1",
    corpus: str | None = None,
    force: bool = False,
    tokenizer: Tokenizer | None = None,
    **sampling: Any,
) -> dict[str, Any]:
    """The record of a model's samples: Gen. PPL, entropy and more, with standard errors and real text beside them.

    A model draws `num` samples from `seed` on; `sampling` are further keywords of its `generate`. Samples are scored as
    they are; give them the model's `tokenizer`. Without a `scorer` the exact law judges stories, and smollm2 the rest.
    A `corpus` whose tokenizer or split contradicts what the model was trained on is refused, unless you `force` it.
    """
    from convergeflow import zoo
    from convergeflow.evaluation.assess import SampleSet, assessor_for
    from convergeflow.evaluation.protocol import protocols_named
    from convergeflow.evaluation.reference import find_reference
    from convergeflow.results.cost import check_request
    from convergeflow.results.draw import origin
    from convergeflow.results.record import make
    from convergeflow.systems.generation import outlined
    from convergeflow.systems.protocol import LanguageModel, Samples

    if not isinstance(model, str | Path | LanguageModel | Samples):
        raise UserError(f"`evaluate` takes a model, its name, or what `generate` returned, not {type(model).__name__}")
    chosen = protocols_named(protocol)
    if len(chosen) > 1:
        raise UserError(f"one record has one protocol: call evaluate for each of {protocol}")

    def text_for(tokenizer: Tokenizer | None, num: int, length: int, **how: Any) -> Reference | None:
        return find_reference(corpus, tokenizer, num, length, lambda message: None, force=force, **how)

    if isinstance(model, Samples):
        given = SampleSet.of(model, {}, tokenizer)
        return make(assessor_for(text_for(tokenizer, *given.ids.shape), scorer or "").assess(given, chosen[0]))
    loaded = load(model) if isinstance(model, str | Path) else model
    about = origin(model, loaded) if isinstance(model, str | Path) else {"method": loaded.method}
    known = {word: sampling[word] for word in ("prompt", "infill", "gap", "length") if word in sampling}
    length = outlined(loaded, **known).length
    check_request(loaded, num, length, 1)
    if corpus is None and isinstance(model, str | Path):
        corpus = zoo.trained_on(model, length)
    assessor = assessor_for(text_for(loaded.tokenizer, num, length, trained_on=loaded.trained_on), scorer or "")
    assessor.check(loaded, chosen)
    drawn = SampleSet.of(loaded.generate(num, seed=seed, **sampling), about, loaded.tokenizer)
    return make(assessor.assess(drawn, chosen[0]))


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """A public class at its first use; it is an ordinary attribute afterwards."""
        if name == "__version__":
            value = _version()
        elif name in _HOMES:
            value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("convergeflow")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0.0.0+source"


wait_for_transformers()
