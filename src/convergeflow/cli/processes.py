"""Several processes of one command, as `torchrun` and `accelerate launch` start them."""

from __future__ import annotations

import os
import re

from convergeflow.errors import UserError


def number_of_processes() -> int:
    """How many processes the launcher says there are."""
    said = os.environ.get("WORLD_SIZE", "1")
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        value = os.environ.get(name, "0" if name != "WORLD_SIZE" else "1")
        if not re.fullmatch(r"\d{1,6}", value):
            raise UserError(f"the environment variable {name} is {value!r}, not a number: unset it or use torchrun")
    return max(1, int(said))


def lost_process(failure: BaseException) -> bool:
    """Whether a failure says that another process of the same command ended or cannot be reached."""
    if not isinstance(failure, RuntimeError | ConnectionError | TimeoutError):
        return False
    said = f"{type(failure).__name__} {failure}"
    if re.search(r"gloo/transport|nccl|process ?group|distbackenderror", said, re.IGNORECASE):
        return True
    try:
        together = number_of_processes() > 1
    except UserError:
        return False
    signs = r"gloo|connection (reset|closed)|broken pipe|socket|store|peer|timed? ?out|rendezvous"
    return together and re.search(signs, said, re.IGNORECASE) is not None
