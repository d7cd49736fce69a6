"""Small systems of other authors, from the files that their own code wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from convergeflow.interop.peers import Wanted, load_peer

PEERS = Path(__file__).resolve().parents[1] / "golden" / "peers"
SOURCES = {
    "mdlm": ("mdlm", "mdlm/hf"),
    "duo": ("duo", "duo/hf"),
    "sedd-absorb": ("sedd", "sedd/absorb/hf"),
    "sedd-uniform": ("sedd", "sedd/uniform/hf"),
    "ar": ("ar", "mdlm/ar_plain.ckpt"),
    "flm": ("flm", "flm/flm_plain.ckpt"),
    "fmlm": ("fmlm", "fmlm/fmlm_double_plain.ckpt"),
    "elf": ("elf", "elf/ckpt"),
    "plaid": ("plaid", "plaid"),
}


def published(name: str) -> Any:
    """A model that samples 16 tokens."""
    peer, source = SOURCES[name]
    return load_peer(PEERS / source, Wanted(peer, length=16)).model
