"""Models of the hub by name. Nothing here touches the network unless a user names a repository that is not here yet."""

from __future__ import annotations

import re
from pathlib import Path

from convergeflow.errors import ConvergeFlowError, UserError

PREFIX = "hf:"
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
FILES = ("*.json", "*.safetensors", "*.md", "*.py")
"""What a checkpoint folder on the hub holds."""


def hub_folder(name: str, revision: str | None = None) -> Path:
    """The local copy of the hub's `owner/name`, which is fetched now if it is not here."""
    if not REPOSITORY.fullmatch(name) or name.startswith("."):
        raise UserError(f"{name} is neither a folder here nor a repository of the hub (owner/name)")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(FILES)))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as failure:
        said = next((line.strip() for line in str(failure).splitlines() if line.strip()), type(failure).__name__)
        raise ConvergeFlowError(f"{name} is not on this machine, and the hub did not give it: {said[:160]}") from None


def named_on_hub(name: str) -> Path | None:
    """The folder of a model that is named hf:owner/name or hf:owner/name@revision; None for other names."""
    if not name.startswith(PREFIX):
        return None
    repository, _, revision = name.removeprefix(PREFIX).partition("@")
    return hub_folder(repository, revision or None)
