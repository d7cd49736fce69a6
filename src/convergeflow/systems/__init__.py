"""The rivals of ConvergeFlow, one file each, under the same protocol, on the same trunk and files.

`METHODS` names them all; a rival's file is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from convergeflow.errors import unknown_name

_HOMES = {
    "ar": ("autoregressive", "AutoregressiveModel"),
    "mdlm": ("mdlm", "MdlmModel"),
    "sedd-absorb": ("sedd", "SeddAbsorbModel"),
    "sedd-uniform": ("sedd", "SeddUniformModel"),
    "duo": ("duo", "DuoModel"),
    "flm": ("flm", "FlmModel"),
    "langflow": ("langflow", "LangFlowModel"),
    "elf": ("elf", "ElfModel"),
    "plaid": ("plaid", "PlaidModel"),
}

SUMMARIES = {
    "ar": "autoregressive transformer: next-token prediction, exact likelihood",
    "mdlm": "masked diffusion with the SUBS parameterisation",
    "sedd-absorb": "score entropy discrete diffusion, absorbing state",
    "sedd-uniform": "score entropy discrete diffusion, uniform state",
    "duo": "uniform-state diffusion with a Gaussian curriculum",
    "flm": "flow on one-hot vectors with a time warp by argmax accuracy",
    "langflow": "ConvergeFlow's network trained by cross-entropy, sampled with the previous step's prediction",
    "elf": "flow on the outputs of a frozen contextual encoder, with a trained decoder",
    "plaid": "likelihood-trained diffusion on low-dimensional token embeddings",
}
"""One line on each rival, for lists and reports."""


class _Methods(Mapping[str, Any]):
    """Name -> class, imported on first use: naming the methods must not load torch."""

    def __getitem__(self, name: str) -> Any:
        if name not in _HOMES:
            raise KeyError(name)
        module, cls = _HOMES[name]
        return getattr(importlib.import_module(f"convergeflow.systems.{module}"), cls)

    def __iter__(self) -> Iterator[str]:
        return iter(_HOMES)

    def __len__(self) -> int:
        return len(_HOMES)


METHODS: Mapping[str, Any] = _Methods()


def method_class(name: str) -> Any:
    """The class of a rival by name; an unknown name is refused with the nearest one."""
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]


MODEL_TYPES = {f"convergeflow-{name}": name for name in _HOMES}
"""`model_type` in config.json -> method."""


def register(model_type: str) -> None:
    """Make transformers' Auto classes know a rival's checkpoints: its file registers it when imported."""
    if model_type not in MODEL_TYPES:
        raise unknown_name("model type", model_type, ["convergeflow", *MODEL_TYPES])
    METHODS[MODEL_TYPES[model_type]]
