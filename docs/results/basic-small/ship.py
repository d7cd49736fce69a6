"""A training run (or one of its checkpoints) as a folder in half precision, with card and preset: how basic-small ships.

python docs/results/basic-small/ship.py runs/basic card.md src/convergeflow/checkpoints/basic-small
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from convergeflow.training import checkpoint
from convergeflow.zoo import load_model, locate


def main(run: str, card: str, target: str) -> None:
    source, model = locate(run), load_model(run)  # the averaged weights, if there are any
    model.config = replace(model.config, preset="clear")
    # The schedule has three numbers, which are worth their digits.
    weights = {
        name: value if name.startswith("learned_schedule") else value.half()
        for name, value in model.state_dict().items()
    }

    def write(folder: Path) -> None:
        model.save_pretrained(folder, state_dict=weights)
        shutil.copy(source / "run.json", folder)
        shutil.copy(card, folder / "card.md")

    checkpoint.write_folder(Path(target), write)


if __name__ == "__main__":
    main(*sys.argv[1:])
