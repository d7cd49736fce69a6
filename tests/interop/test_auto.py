"""The front door for transformers: a shipped folder through AutoModel gives the tokens of the system itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel

import convergeflow.interop.auto  # noqa: F401  (registers the model types)
from convergeflow import zoo
from convergeflow.errors import UserError
from convergeflow.systems import METHODS


def test_a_shipped_model_through_the_auto_classes() -> None:
    folder = zoo.locate("stories-small")
    loaded, own = AutoModel.from_pretrained(folder), zoo.load_model("stories-small", device="cpu")
    assert AutoConfig.from_pretrained(folder).width == own.config.width
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert not loaded.training
    assert torch.equal(loaded.generate(2, nfe=6, length=12).ids, own.generate(2, nfe=6, length=12).ids)


@pytest.mark.parametrize("name", METHODS)
def test_every_system_comes_back_with_its_own_class(name: str, tmp_path: Path) -> None:
    cls = METHODS[name]
    torch.manual_seed(0)
    model = cls(cls.config_class.of_size("test", vocabulary=7, length=4))
    model.save_pretrained(tmp_path / "a")
    AutoModel.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    again = cls.from_pretrained(tmp_path / "b")
    assert type(AutoModel.from_pretrained(tmp_path / "b").system) is cls
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key


def test_a_weight_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    cls = METHODS["convergeflow"]
    cls(cls.config_class.of_size("test", vocabulary=7, length=4)).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "vocabulary": 8}))
    with pytest.raises(UserError, match="mis-shaped"):
        AutoModel.from_pretrained(tmp_path)
