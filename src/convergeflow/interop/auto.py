"""The front door for transformers: import this module, and its Auto classes know the systems of this package.

    import convergeflow.interop.auto
    from transformers import AutoModel

    model = AutoModel.from_pretrained("runs/stories/model").system

What comes back wraps a system: `forward` and `generate` are the system's own, and so are strict loading and float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from convergeflow.systems import IMPORTED, METHODS, class_of_type
from convergeflow.systems.protocol import LanguageModel, Samples


class AutoSystemConfig(PreTrainedConfig):
    """The values of a system's config.json as transformers holds them."""


class AutoSystem(PreTrainedModel):
    """A system of this package (`system`) as transformers holds a model."""

    config_class = AutoSystemConfig
    base_model_prefix = "system"
    main_input_name = "x_t"

    def __init__(self, config: AutoSystemConfig, system: LanguageModel | None = None) -> None:
        super().__init__(config)
        kind = class_of_type(config.model_type)
        self.system = kind(kind.config_class.from_dict(config.to_dict())) if system is None else system

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """The system's own forward pass."""
        return self.system(*inputs, **options)

    def generate(self, *values: Any, **options: Any) -> Samples:  # type: ignore[override]
        """The system's own generation."""
        return self.system.generate(*values, **options)

    def save_pretrained(self, save_directory: Any, **_: Any) -> None:  # type: ignore[override]
        """The system's own checkpoint folder."""
        self.system.save_pretrained(save_directory)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *_: Any, **options: Any) -> AutoSystem:  # type: ignore[override]
        """Load a folder, or a hub repository `owner/name`, in float32; a weight that does not fit is an error."""
        folder = Path(str(pretrained_model_name_or_path))
        if not folder.exists():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(str(pretrained_model_name_or_path), revision=options.get("revision")))
        config = cls.config_class.from_pretrained(folder)
        return cls(config, class_of_type(config.model_type).from_pretrained(folder)).eval()


def _register(model_type: str) -> None:
    config = type("AutoSystemConfig", (AutoSystemConfig,), {"model_type": model_type})
    AutoConfig.register(model_type, config)
    AutoModel.register(config, type("AutoSystem", (AutoSystem,), {"config_class": config}))


for _kinds in (METHODS, IMPORTED):
    for _name in _kinds:
        _register(_kinds[_name].model_type())
