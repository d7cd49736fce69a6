"""Likelihoods in a unit that does not depend on the tokenizer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from convergeflow.data.tokenizer import Tokenizer
from convergeflow.errors import UserError


def bytes_per_token(tokens: Tensor | np.ndarray[Any, Any], tokenizer: Tokenizer) -> float:
    """UTF-8 bytes of the decoded text over tokens; an end of text is a line break."""
    rows = [[int(token) for token in row] for row in np.asarray(tokens)]
    total = sum(len(tokenizer.decode(row).encode()) for row in rows)
    count = sum(map(len, rows))
    if total == 0:
        raise UserError("the text is empty: bits per byte have no meaning")
    return total / count


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """The same likelihood in a unit that does not depend on the tokenizer."""
    return nats_per_token / math.log(2) / bytes_per_token
