"""A task for lm-evaluation-harness in two local files: which answer agrees with the story? `acc` should be 1."""

from __future__ import annotations

import json
from pathlib import Path

NAME = "stories_choice"
GIRL, BOY = "she lost her ball", "he lost his kite"
QUESTIONS = [
    {"context": "Once there was a little girl named Mia. She had a red ball. One day", "choices": [GIRL, BOY]},
    {"context": "Tom was a busy boy. He had a blue kite. One day", "choices": [BOY, GIRL]},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""


def write_task(folder: Path) -> None:
    """The questions and their description."""
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
    (folder / f"{NAME}.yaml").write_text(TASK.format(file=file, name=NAME))
