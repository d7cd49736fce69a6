"""A folder for the hub: what lies in it, who can open it, and the way there and back, without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch

import convergeflow as cf
from convergeflow import zoo
from convergeflow.errors import ConvergeFlowError
from convergeflow.interop.hub import export


def outside(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub that is a folder."""
    place = tmp_path / "hub"

    def upload(*, repo_id: str, folder_path: str, commit_message: str) -> None:
        shutil.copytree(folder_path, place / repo_id)

    def create(name: str, private: Any, exist_ok: bool) -> str:
        return f"https://hub/{name}"

    def download(name: str, revision: str | None, allow_patterns: Any) -> str:
        if not (place / name).is_dir():
            raise OSError(f"no repository {name}\nand a long page about tokens")
        return str(place / name)

    api = SimpleNamespace(create_repo=create, upload_folder=upload)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda token: api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return place


def test_to_the_hub_and_back(hub: Path) -> None:
    model = cf.load("stories-small", device="cpu")
    assert model.push_to_hub("someone/stories", private=True) == "https://hub/someone/stories"
    folder = hub / "someone" / "stories"
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: convergeflow\n") and 'cf.load("hf:someone/stories")' in card
    assert "`sharp`" in card and "How it was trained" in card and "pipeline" in card
    for again in (
        cf.load("hf:someone/stories", device="cpu"),
        cf.load("hf:someone/stories@v1", device="cpu"),
        cf.LanguageModel.from_pretrained("someone/stories"),
    ):
        assert again.config == model.config and again.config.preset == "sharp"
        assert again.generate(seed=2, nfe=4).texts == model.generate(seed=2, nfe=4).texts
    with pytest.raises(cf.UserError, match="is owner/name"):
        model.push_to_hub("stories")


def test_what_the_hub_does_not_give_is_one_line(hub: Path) -> None:
    with pytest.raises(ConvergeFlowError, match=r"the hub did not give it: no repository someone/else$"):
        cf.load("hf:someone/else")
    with pytest.raises(cf.UserError, match="neither a folder here nor a repository"):
        cf.LanguageModel.from_pretrained("./nowhere/at/all")
    with pytest.raises(cf.UserError, match="hf:owner/name"):
        cf.load("someone/else")  # the network is asked by name only


def test_auto_classes_know_the_systems_after_the_import_which_loads_nothing() -> None:
    folder = zoo.locate("stories-small")
    code = f"""
import sys
import convergeflow
assert not {{"torch", "transformers"}} & set(sys.modules)
from transformers import AutoModel, AutoTokenizer
model, tokenizer = AutoModel.from_pretrained({str(folder)!r}), AutoTokenizer.from_pretrained({str(folder)!r})
made = model.generate(seed=7, nfe=4)
assert tokenizer.decode(made.ids[0]) == made.texts[0], (tokenizer.decode(made.ids[0]), made.texts[0])
assert tokenizer.batch_decode(made.ids) == made.texts
assert tokenizer(made.texts[0])["input_ids"] == [i for i in made.ids[0].tolist() if i != tokenizer.eos_token_id]
print(made.texts[0])
"""
    printed = outside(code).strip()
    assert printed == cf.load("stories-small", device="cpu").generate(seed=7, nfe=4).texts[0].strip()  # type: ignore[index]


@pytest.mark.parametrize(
    "order",
    [
        "import convergeflow\nfrom transformers import AutoModel",
        "from transformers import AutoConfig, PreTrainedModel\nimport convergeflow\nfrom transformers import AutoModel",
        "from transformers import AutoTokenizer, AutoModel\nimport convergeflow",
        "import convergeflow.interop.auto\nfrom transformers import AutoModel",
    ],
)
def test_the_order_of_imports_does_not_matter(order: str) -> None:
    folder = zoo.locate("stories-ar")
    code = f"{order}\nprint(type(AutoModel.from_pretrained({str(folder)!r}).system).__name__)"
    assert outside(code).strip() == "AutoregressiveModel"


@pytest.mark.parametrize("name", ["stories-small", "stories-mdlm"])
def test_a_folder_for_the_hub_opens_with_trust_remote_code(name: str, tmp_path: Path) -> None:
    model = cf.load(name, device="cpu")
    export(model, tmp_path / "folder")
    code = (tmp_path / "folder" / "convergeflow_auto.py").read_text()
    assert len(code.splitlines()) < 10
    made = outside(f"""
from transformers import AutoModel, AutoTokenizer
folder = {str(tmp_path / "folder")!r}
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModel.from_pretrained(folder, trust_remote_code=True)
made = model.generate(seed=3, nfe=4)
assert tokenizer.decode(made.ids[0]) == made.texts[0]
print(made.ids[0].tolist())
""")
    assert made.strip().splitlines()[-1] == str(model.generate(seed=3, nfe=4).ids[0].tolist())


def test_what_transformers_cannot_do_is_said(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoModelForCausalLM, pipeline

    folder = str(zoo.locate("stories-small"))
    with pytest.raises(cf.UserError, match="does not write token after token"):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"AutoModel\.from_pretrained"):
        pipeline("text-generation", model=folder)
    with pytest.raises(cf.UserError, match="stay float32"):
        AutoModel.from_pretrained(folder, dtype=torch.bfloat16)
    with pytest.raises(cf.UserError, match="stay float32"):
        AutoModel.from_pretrained(folder).half()
    with pytest.raises(cf.UserError, match="name one device"):
        AutoModel.from_pretrained(folder, device_map="auto")
    assert AutoModel.from_pretrained(folder, dtype="float64").system.precision.kernel == torch.float64
