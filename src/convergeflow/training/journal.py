"""What happened, line by line: `journal.jsonl` for numbers, `timing.jsonl` for clocks, TensorBoard on request.

The journal holds nothing that depends on the clock or the machine. A run that was killed and resumed writes the same
journal as an unbroken one, byte for byte: it cuts the journal back to where its checkpoint was taken.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from convergeflow.errors import UserError
from convergeflow.training.recipes import leaves

FILE = "journal.jsonl"


class Journal:
    """An append-only JSONL file that can be cut back; beside it the timing file, which is only ever appended to."""

    def __init__(self, folder: Path, *, keep_bytes: int = 0, tensorboard: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < keep_bytes:
            raise UserError(
                f"{self.path} is shorter than its checkpoint says ({size} < {keep_bytes} bytes): it was edited"
            )
        self._file = self.path.open("r+b" if size else "wb")
        self._file.truncate(keep_bytes)
        self._file.seek(keep_bytes)
        self._timing = (folder / "timing.jsonl").open("a", encoding="utf-8")
        self._board = _open_board(folder) if tensorboard else None

    def write(self, record: dict[str, Any]) -> None:
        """Append one record and hand it to the operating system."""
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
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
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

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
    return SummaryWriter(str(folder / "tensorboard"))


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a journal; a last line cut short by a crash is left out."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
