"""A model for the hub: a folder that this package and transformers can open, with a card, and the way there."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.systems.config import CONFIG_FILE
from convergeflow.systems.hub import REPOSITORY
from convergeflow.systems.protocol import LanguageModel

REMOTE = "convergeflow_auto"
"""The one file of code in a folder of the hub; see `REMOTE_CODE`."""
REMOTE_CODE = '''"""Lets transformers open this folder with trust_remote_code=True; the model is in convergeflow."""

from convergeflow.interop.auto import OwnTokenizer, config_class, system_class

ConvergeFlowTokenizer, AutoSystemConfig = OwnTokenizer, config_class("{model_type}")
AutoSystem = system_class("{model_type}")
'''


def export(model: LanguageModel, folder: str | Path, name: str = "owner/name") -> Path:
    """Write a folder as it stands on the hub: weights, tokenizer, preset, card, and the file for transformers."""
    folder = Path(folder)
    model.save_pretrained(folder)
    _change(
        folder / CONFIG_FILE,
        auto_map={"AutoConfig": f"{REMOTE}.AutoSystemConfig", "AutoModel": f"{REMOTE}.AutoSystem"},
        architectures=["AutoSystem"],
    )
    if model.tokenizer is not None:
        _change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, f"{REMOTE}.ConvergeFlowTokenizer"]})
    (folder / f"{REMOTE}.py").write_text(REMOTE_CODE.format(model_type=model.model_type()), encoding="utf-8")
    (folder / "README.md").write_text(card(model, name), encoding="utf-8")
    return folder


def push_to_hub(
    model: LanguageModel,
    name: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    message: str | None = None,
) -> str:
    """Put a model on the hub as `owner/name`, which is made if it is not there, and return its address."""
    if not REPOSITORY.fullmatch(name):
        raise UserError(f"a repository of the hub is owner/name, not {name!r}")
    import huggingface_hub

    with tempfile.TemporaryDirectory() as folder:
        export(model, folder, name)
        try:
            hub = huggingface_hub.HfApi(token=token)
            address = str(hub.create_repo(name, private=private, exist_ok=True))
            hub.upload_folder(repo_id=name, folder_path=folder, commit_message=message or f"{model.method} model")
        except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as failure:
            said = next((line.strip() for line in str(failure).splitlines() if line.strip()), type(failure).__name__)
            raise ConvergeFlowError(
                f"the hub did not take {name}: {said[:200]} (log in with `hf auth login`)"
            ) from None
    return address


def card(model: LanguageModel, name: str) -> str:
    """The page of a model on the hub: how to use it, and the card that it was trained with."""
    config = model.config
    preset = getattr(config, "preset", None)
    own = f"\n- its own sampling preset, used unless you name another: `{preset}`" if preset else ""
    words = "" if model.tokenizer is None else f"\n- tokenizer: {model.tokenizer.kind}, {model.tokenizer.size:,} tokens"
    trained = (
        "" if model.card is None else f"\n## How it was trained\n\n{model.card.replace('# ', '### ', 1).strip()}\n"
    )
    return f"""---
library_name: convergeflow
tags:
- convergeflow
- flow-matching
- text-generation
---

# {name}

A `{model.method}` model: {config.depth} layers, width {config.width}, sequences of {config.length} tokens.
{own}{words}

```python
import convergeflow as cf  # pip install convergeflow

model = cf.load("hf:{name}")
print(model.generate(num=1, seed=0).texts[0])
```

With transformers, which opens the same folder:

```python
from transformers import AutoModel, AutoTokenizer

model = AutoModel.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
print(tokenizer.decode(model.generate(num=1, seed=0).ids[0]))
```

`trust_remote_code` runs `{REMOTE}.py`, a few lines that import the package convergeflow; after `import convergeflow` it
is not needed. `pipeline("text-generation")` cannot drive this model: it asks for the logits of the next token, and this
model is sampled by its own `generate`.
{trained}"""


def _change(path: Path, **values: Any) -> None:
    """The same JSON file with some more values."""
    before = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**before, **values}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
