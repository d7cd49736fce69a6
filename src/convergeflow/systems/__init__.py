"""ConvergeFlow and its rivals, one file each, under the same protocol, on the same trunk and files.

`METHODS` names them all. A system's file is imported when it is first asked for, so that naming the methods does not
load torch. Another package adds a system by an entry point `convergeflow.systems`, whose name is the method's and whose
value is a subclass of `protocol.LanguageModel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from convergeflow.errors import unknown_name
from convergeflow.plugins import Registry

if TYPE_CHECKING:
    from convergeflow.systems.protocol import LanguageModel

OURS = "convergeflow"

METHODS: Registry[type[LanguageModel]] = Registry(
    "method",
    "systems",
    {
        OURS: (
            "convergeflow.systems.convergeflow:ConvergeFlowModel",
            "the paper's flow: embedding-weighted predictor, MSE objective",
        ),
        "ar": (
            "convergeflow.systems.autoregressive:AutoregressiveModel",
            "autoregressive transformer: next-token prediction, exact likelihood",
        ),
        "mdlm": ("convergeflow.systems.mdlm:MdlmModel", "masked diffusion with the SUBS parameterisation"),
        "sedd-absorb": (
            "convergeflow.systems.sedd:SeddAbsorbModel",
            "score entropy discrete diffusion, absorbing state",
        ),
        "sedd-uniform": (
            "convergeflow.systems.sedd:SeddUniformModel",
            "score entropy discrete diffusion, uniform state",
        ),
        "duo": ("convergeflow.systems.duo:DuoModel", "uniform-state diffusion with a Gaussian curriculum"),
        "flm": ("convergeflow.systems.flm:FlmModel", "flow on one-hot vectors with a time warp by argmax accuracy"),
        "langflow": (
            "convergeflow.systems.langflow:LangFlowModel",
            "ConvergeFlow's network trained by cross-entropy, sampled with the previous step's prediction",
        ),
        "elf": (
            "convergeflow.systems.elf:ElfModel",
            "ELF-like: flow on the outputs of a frozen contextual encoder, with a trained decoder, on the shared trunk",
        ),
        "plaid": (
            "convergeflow.systems.plaid:PlaidModel",
            "likelihood-trained diffusion on low-dimensional token embeddings",
        ),
    },
)
"""Method name -> class."""

IMPORTED: Registry[type[LanguageModel]] = Registry(
    "published system",
    "published",
    {
        f"published-{name}": f"convergeflow.systems.published.{home}"
        for name, home in {
            "ar": "autoregressive:PublishedAr",
            "mdlm": "discrete:PublishedMdlm",
            "sedd-absorb": "discrete:PublishedSeddAbsorb",
            "sedd-uniform": "discrete:PublishedSeddUniform",
            "duo": "discrete:PublishedDuo",
            "flm": "flm:PublishedFlm",
            "fmlm": "flm:PublishedFmlm",
            "elf": "elf:PublishedElf",
            "plaid": "plaid:PublishedPlaid",
        }.items()
    },
)
"""Systems with their authors' own networks and weights, which `convergeflow import` makes; they are not trained."""


def rivals() -> list[str]:
    """The names of all systems but ConvergeFlow."""
    return [name for name in METHODS if name != OURS]


def class_of_type(model_type: str) -> type[LanguageModel]:
    """The class of a system by the `model_type` in its config.json."""
    name = model_type.removeprefix("convergeflow-")
    if name in IMPORTED and model_type != name:
        return IMPORTED[name]
    if name not in METHODS or (model_type != OURS and model_type == name):
        known = [OURS, *(f"convergeflow-{other}" for other in (*rivals(), *IMPORTED))]
        raise unknown_name("model type", model_type, known)
    return METHODS[name]
