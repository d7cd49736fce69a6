"""What happened, line by line: `journal.jsonl` for numbers, `timing.jsonl` for clocks, TensorBoard on request.

The journal holds nothing that depends on the clock or the machine. A run that was killed and resumed writes the same
journal as an unbroken one, byte for byte: it cuts the journal back to where its checkpoint was taken.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from convergeflow import files
from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.training.recipes import leaves

FILE, TIMING, BOARD = "journal.jsonl", "timing.jsonl", "tensorboard"


class Journal:
    """An append-only JSONL file that can be cut back; beside it the timing file, which is only ever appended to."""

    def __init__(
        self, folder: Path, *, keep_bytes: int = 0, keep_sha256: str | None = None, tensorboard: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self._file = os.fdopen(files.open_to_append(self.path), "r+b")
        kept = self._file.read(keep_bytes)
        self._hash = hashlib.sha256(kept)
        if len(kept) < keep_bytes:
            raise UserError(
                f"{self.path} is shorter than its checkpoint says ({len(kept)} < {keep_bytes} bytes): it was edited"
            )
        if keep_sha256 is not None and self._hash.hexdigest() != keep_sha256:
            raise UserError(
                f"{self.path} is not what it was when its checkpoint was taken: put it back from a copy, or start "
                "again in another `out`"
            )
        self._file.truncate(keep_bytes)
        self._timing = os.fdopen(files.open_to_append(folder / TIMING), "a", encoding="utf-8")
        self._board = _open_board(folder) if tensorboard else None

    def write(self, record: dict[str, Any]) -> None:
        """Append one record and hand it to the operating system."""
        line = json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        self._check_present()
        self._file.write(line)
        self._file.flush()
        self._hash.update(line)
        if self._board is not None and "step" in record:
            for path, value in leaves(record):
                if isinstance(value, int | float) and path != ("step",):
                    self._board.add_scalar("/".join(path), value, record["step"])

    def time(self, record: dict[str, Any]) -> None:
        """Append one record of clock times or events."""
        self._timing.write(json.dumps(record) + "\n")
        self._timing.flush()

    def sync(self) -> int:
        """Force everything to the disk; the number of bytes written."""
        self._check_present()
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    @property
    def sha256(self) -> str:
        """Of everything written."""
        return self._hash.hexdigest()

    def _check_present(self) -> None:
        """A file that was deleted or replaced is written into nowhere, without a word from the system."""
        try:
            same = os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except OSError:
            same = False
        if not same:
            raise ConvergeFlowError(
                f"{self.path} was deleted, moved or replaced while the run was writing it: the run stopped here"
            )

    def close(self) -> None:
        self._file.close()
        self._timing.close()
        if self._board is not None:
            self._board.close()


def _open_board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        raise UserError("tensorboard=true needs TensorBoard: pip install 'convergeflow[tensorboard]'") from None
    return SummaryWriter(str(folder / BOARD))


def shown_loss(numbers: dict[str, Any]) -> float:
    """The loss of a step for people: without the fit of the noise schedule, which is minimised beside it."""
    return float(numbers["ce"] if "schedule_fit" in numbers else numbers["loss"])


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a journal; a last line cut short by a crash is left out."""
    found: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {number} is not a record: the journal is damaged")
        found.append(record)
    return found
