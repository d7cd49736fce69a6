"""Models of the hub by name. Nothing here touches the network unless a user names a repository that is not here yet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from convergeflow.errors import ConvergeFlowError, UserError

PREFIX = "hf:"
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
FILES = ("*.json", "*.safetensors", "*.md", "*.py")
"""What a checkpoint folder on the hub holds."""

PATIENCE = 10.0
"""Seconds that the hub has for its first answer."""
_barred: ContextVar[bool] = ContextVar("barred", default=False)


@contextmanager
def without_network() -> Iterator[None]:
    """For the time of a `with` block only what is on this machine is found."""
    token = _barred.set(True)
    try:
        yield
    finally:
        _barred.reset(token)


def asked_once(name: str, revision: str | None = None) -> dict[str, Any]:
    """Options for a download of `name`: where the hub does not answer, that it must be here already.

    The hub's client tries five times, for half a minute, and tells every try.
    """
    if Path(name).exists():
        return {}
    if _barred.get():
        return {"local_files_only": True}
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE:
        return {}  # the client itself asks nobody
    try:
        HfApi().model_info(name, revision=revision, timeout=PATIENCE)
    except errors.HfHubHTTPError:
        return {}  # an answer, if a refusal: the download says what it means
    except Exception:  # httpx's and the operating system's errors: to the user they are one thing
        return {"local_files_only": True}
    return {}


def hub_folder(name: str, revision: str | None = None) -> Path:
    """The local copy of the hub's `owner/name`, which is fetched now if it is not here."""
    if not REPOSITORY.fullmatch(name) or name.startswith("."):
        raise UserError(f"{name} is neither a folder here nor a repository of the hub (owner/name)")
    import huggingface_hub

    try:
        how = asked_once(name, revision)
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(FILES), **how))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as failure:
        said = next((line.strip() for line in str(failure).splitlines() if line.strip()), type(failure).__name__)
        raise ConvergeFlowError(f"{name} is not on this machine, and the hub did not give it: {said[:160]}") from None


def named_on_hub(name: str) -> Path | None:
    """The folder of a model that is named hf:owner/name or hf:owner/name@revision; None for other names."""
    if not name.startswith(PREFIX):
        return None
    repository, _, revision = name.removeprefix(PREFIX).partition("@")
    return hub_folder(repository, revision or None)
