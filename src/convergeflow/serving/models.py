"""The models of a server: loaded once, by name, and again when their folder has changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from convergeflow import zoo
from convergeflow.errors import UserError, unknown_name
from convergeflow.sampling.settings import PRESETS
from convergeflow.sampling.wrappers import NetworkPredictor
from convergeflow.systems.protocol import LanguageModel

Signature = tuple[tuple[str, int, int, int], ...]


def signature(folder: Path) -> Signature:
    """What tells a folder's state from another: name, time, size and number of each of its files.

    All of them count: a manifest lists them all, so a copy is whole only when the last of them is there.
    """
    found = []
    for path in sorted(folder.iterdir()):
        with suppress(FileNotFoundError):  # gone since it was listed
            status = path.stat()
            found.append((path.name, status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


@dataclass(frozen=True)
class Served:
    """One model as it was loaded; requests keep the one that they began with."""

    name: str
    model: LanguageModel
    predictor: NetworkPredictor | None
    """Of a flow, bound once: requests share network passes only if they share it."""
    signature: Signature
    created: int

    @classmethod
    def load(cls, name: str, source: str | Path, device: str = "auto") -> Served:
        folder = zoo.locate(source)
        seen = signature(folder)
        model = zoo.load_model(source, device=device).eval()
        if model.tokenizer is None:
            raise UserError(f"{source} has no tokenizer: a server answers with text, so put tokenizer.json beside it")
        flow = model.as_flow()
        return cls(name, model, None if flow is None else flow.bind(), seen, int(time.time()))

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    @cached_property
    def about(self) -> dict[str, Any]:
        """What a client may want to know before it asks."""
        config = self.model.config
        return {
            "method": self.model.method,
            "length": config.length,
            "width": config.width,
            "vocabulary": config.vocabulary,
            "preset": getattr(config, "preset", None),
            "block_length": getattr(config, "block_length", None),
            "predictor": getattr(config, "predictor", None),
            "controls": sorted(self.model.controls),
            "flow": self.predictor is not None,
            "presets": [] if self.predictor is None else list(PRESETS),
        }


class Shelf:
    """Models by name."""

    def __init__(self, sources: Sequence[str], device: str = "auto") -> None:
        self.device = device
        self.sources = {_name(source): source for source in sources}
        if len(self.sources) < len(sources):
            names = [_name(source) for source in sources]
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"two models are called {twice}: name it once, or rename one of the folders")
        self.models = {name: Served.load(name, source, device) for name, source in self.sources.items()}
        self._refused: dict[str, Signature] = {}

    def __getitem__(self, name: str) -> Served:
        if name not in self.models:
            raise unknown_name("model", name, self.models)
        return self.models[name]

    def refresh(self, say: Callable[[str], None] = lambda message: None) -> list[str]:
        """Load what has changed on disk; a folder that cannot be loaded is left as it was, and said so once."""
        changed = []
        for name, source in self.sources.items():
            now = _signature_or_none(source)
            if now == self.models[name].signature or now == self._refused.get(name):
                continue
            try:
                fresh = Served.load(name, source, self.device)
            except Exception as failure:
                # What was refused is what was there before: it may be whole by now.
                self._refused[name] = now
                say(f"{name} has changed and cannot be loaded, the old one stays: {' '.join(str(failure).split())}")
                continue
            if fresh.signature != _signature_or_none(source):
                continue  # still being written: the next round sees the end
            self.models[name] = fresh
            self._refused.pop(name, None)
            changed.append(name)
            say(f"{name} has changed and was loaded again")
        return changed


def _signature_or_none(source: str) -> Signature:
    try:
        return signature(zoo.locate(source))
    except Exception:
        return ()


def _name(source: str) -> str:
    """The name that clients use: of a folder its last part, so that no path of the server is shown."""
    return source if source in zoo.shipped_models() else Path(source).resolve().name
