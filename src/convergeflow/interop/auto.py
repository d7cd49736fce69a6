"""The front door for transformers: its Auto classes know the systems of this package once it is imported.

    import convergeflow
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained("runs/stories/model")
    tokenizer = AutoTokenizer.from_pretrained("runs/stories/model")

What comes back wraps a system: `forward`, `generate` and `bound` are the system's own, and so are strict loading and
float32. A folder on the hub brings a small file of its own, so that `trust_remote_code=True` works without the first
line; the package must be installed all the same.
"""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from convergeflow.data.tokenizer import OwnFacts, Tokenizer
from convergeflow.errors import UserError
from convergeflow.interop.arrival import config_class
from convergeflow.systems import class_of_type
from convergeflow.systems.hub import hub_folder
from convergeflow.systems.protocol import LanguageModel, Samples


class AutoSystem(PreTrainedModel):
    """A system of this package (`system`) as transformers holds a model."""

    base_model_prefix = "system"
    main_input_name = "x_t"

    def __init__(self, config: Any, system: LanguageModel | None = None) -> None:
        super().__init__(config)
        kind = class_of_type(config.model_type)
        self.system = kind(kind.config_class.from_dict(config.to_dict())) if system is None else system

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """The system's own forward pass."""
        return self.system(*inputs, **options)

    def generate(self, *values: Any, **options: Any) -> Samples:  # type: ignore[override]
        """The system's own generation."""
        return self.system.generate(*values, **options)

    def bound(self, *values: Any, **options: Any) -> Any:
        """The system's own likelihood bound."""
        return self.system.bound(*values, **options)

    def save_pretrained(self, save_directory: Any, **_: Any) -> None:  # type: ignore[override]
        """The system's own checkpoint folder."""
        self.system.save_pretrained(save_directory)

    def push_to_hub(self, name: str, **how: Any) -> str:  # type: ignore[override]
        """The system's own way to the hub."""
        return self.system.push_to_hub(name, **how)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *_: Any, **options: Any) -> AutoSystem:  # type: ignore[override]
        """Load a folder, or a hub repository `owner/name`; a weight that does not fit is an error.

        `dtype` is float32 or float64; half precision is refused. `device_map` may name one device.
        """
        folder = Path(str(pretrained_model_name_or_path))
        if not folder.exists():
            folder = hub_folder(str(pretrained_model_name_or_path), options.get("revision"))
        dtype = options.get("dtype", options.get("torch_dtype"))
        config = cls.config_class.from_pretrained(folder)
        loaded = class_of_type(config.model_type).from_pretrained(folder, dtype=None if dtype == "auto" else dtype)
        place = options.get("device_map")
        if isinstance(place, dict) or place == "auto":
            raise UserError(f"`device_map` {place} would cut the model in parts: name one device, or leave it out")
        whole = cls(config, loaded).eval()
        return whole if place is None else whole.to(place)


class OwnTokenizer(PreTrainedTokenizerFast):
    """The tokenizer of a folder that decodes as this package does: capitals of a word tokenizer, a line per text."""

    # It has no __init__: transformers rebuilds the pipeline of a class that has one from its vocabulary alone.

    @cached_property
    def own(self) -> Tokenizer:
        """The same tokenizer as this package holds it."""
        facts = OwnFacts.model_validate(self.init_kwargs.get("convergeflow") or {})
        return Tokenizer(self.backend_tokenizer, kind=facts.kind, end=str(self.eos_token), capitals=facts.capitals)

    def _decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        return self.own.decode([token_ids] if isinstance(token_ids, int) else token_ids)


OwnTokenizer.__name__ = "ConvergeFlowTokenizer"  # what a tokenizer_config.json names, and arrival has a door for


@cache
def system_class(model_type: str) -> type[AutoSystem]:
    """The class of a system as transformers holds it."""
    return type("AutoSystem", (AutoSystem,), {"config_class": config_class(model_type)})
