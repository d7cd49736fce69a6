"""Number arrays that users hand in or take out as .npy files; pickled ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from convergeflow.errors import UserError


def read_array(path: Path) -> np.ndarray[Any, Any]:
    """A finite float array from a .npy file."""
    if not path.is_file():
        raise UserError(f"{path} does not exist or is no plain file: give a .npy file")
    try:
        # Mapped first: a header may claim any size, and what is mapped must be there.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception:  # numpy reads the header as Python and lets every way to fail at that through
        raise UserError(f"{path} is not a plain .npy array (save it with numpy.save)") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iuf":
        raise UserError(f"{path} must hold one array of real numbers")
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise UserError(f"{path} holds values that are not finite")
    return array
