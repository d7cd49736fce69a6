"""`import convergeflow` is enough for transformers' Auto classes to know its systems, and costs nothing before that.

transformers takes a second or more to load, so this package does not load it. It waits for the three modules in which
the Auto classes keep their lists and adds its own to each, in the moment that the module is there. What it adds are
doors: the classes behind them (`interop.auto`) are loaded when somebody loads a model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from convergeflow.errors import UserError

PLACE = "transformers.models.auto."


def model_types() -> list[str]:
    """As they stand in config.json; nothing is loaded to name them."""
    from convergeflow.systems import IMPORTED, METHODS, OURS

    return [name if name == OURS else f"{OURS}-{name}" for name in (*METHODS, *IMPORTED)]


@cache
def config_class(model_type: str) -> Any:
    """The values of a system's config.json as transformers holds them."""
    from transformers.configuration_utils import PreTrainedConfig

    home = {"model_type": model_type, "__module__": "convergeflow.interop.auto"}
    return type("AutoSystemConfig", (PreTrainedConfig,), home)


class ModelDoor:
    """Stands for the model class of a system."""

    config_class: Any = None

    @classmethod
    def from_pretrained(cls, *values: Any, **options: Any) -> Any:
        from convergeflow.interop.auto import system_class

        return system_class(cls.config_class.model_type).from_pretrained(*values, **options)

    @classmethod
    def _from_config(cls, config: Any, **_: Any) -> Any:
        from convergeflow.interop.auto import system_class

        return system_class(cls.config_class.model_type)(config)


class CausalDoor(ModelDoor):
    """Stands where transformers looks for a causal language model, to say what to use instead."""

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> Any:
        raise UserError(
            "a model of convergeflow does not write token after token, so neither AutoModelForCausalLM nor "
            "pipeline('text-generation') can drive it: use AutoModel.from_pretrained(...).generate(...)"
        )

    _from_config = from_pretrained


class ConvergeFlowTokenizer:
    """Stands for the tokenizer class, which a tokenizer_config.json names."""

    @classmethod
    def from_pretrained(cls, *values: Any, **options: Any) -> Any:
        from convergeflow.interop.auto import OwnTokenizer

        return OwnTokenizer.from_pretrained(*values, **options)


def _add_configs(module: Any) -> None:
    for model_type in model_types():
        module.AutoConfig.register(model_type, config_class(model_type), exist_ok=True)


def _add_models(module: Any) -> None:
    for model_type in model_types():
        own = {"config_class": config_class(model_type)}
        for known, door in ((module.AutoModel, ModelDoor), (module.AutoModelForCausalLM, CausalDoor)):
            known.register(own["config_class"], type(door.__name__, (door,), own), exist_ok=True)


def _add_tokenizers(module: Any) -> None:
    for model_type in model_types():
        module.AutoTokenizer.register(config_class(model_type), ConvergeFlowTokenizer, exist_ok=True)


AWAITED: dict[str, Callable[[Any], None]] = {
    f"{PLACE}configuration_auto": _add_configs,
    f"{PLACE}modeling_auto": _add_models,
    f"{PLACE}tokenization_auto": _add_tokenizers,
}


class _Then(Loader):
    """Loads a module as it would have been, and adds to it."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        AWAITED[module.__name__](module)


class _Waiting(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in AWAITED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


def wait_for_transformers() -> None:
    """Add the systems to the Auto classes that are loaded, and to the others when they come."""
    for name, add in AWAITED.items():
        if name in sys.modules:
            add(sys.modules[name])
    if not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())
