"""Imported LangFlow weights compute what an independent implementation computed with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.interop.langflow import load_langflow
from convergeflow.systems.convergeflow import ConvergeFlowModel

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
TINY = GOLDEN / "langflow_tiny"


@pytest.fixture(scope="module")
def model() -> ConvergeFlowModel:
    return load_langflow(TINY)


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    with numpy.load(GOLDEN / "langflow_tiny_forward.npz") as stored:
        return {name: torch.from_numpy(stored[name]) for name in stored.files}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "checkpoint"))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def change_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@torch.no_grad()
def test_logits_without_self_conditioning(model: ConvergeFlowModel, expected: dict[str, torch.Tensor]) -> None:
    logits = model(expected["x"], expected["gamma"]).logits
    torch.testing.assert_close(logits, expected["logits_empty"], atol=1e-4, rtol=0)


@torch.no_grad()
def test_logits_and_prediction_with_self_conditioning(
    model: ConvergeFlowModel, expected: dict[str, torch.Tensor]
) -> None:
    output = model(expected["x"], expected["gamma"], expected["self_cond"])
    torch.testing.assert_close(output.logits, expected["logits_selfcond"], atol=1e-4, rtol=0)
    torch.testing.assert_close(output.mu, expected["mu_selfcond"], atol=1e-4, rtol=0)
    # The fused head never makes the logits; it must say the same.
    at = model.schedule.at_gamma(expected["gamma"].double())
    fused = model.network(expected["x"], at, expected["self_cond"]).weigh(expected["x"], at)
    torch.testing.assert_close(fused.mu, expected["mu_selfcond"], atol=1e-4, rtol=0)


def test_the_table_is_the_normalised_one(model: ConvergeFlowModel, expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(model.network.embedding.rows().detach(), expected["embedding"], atol=1e-5, rtol=0)


def test_the_schedule_comes_from_the_weights(copy: Path) -> None:
    change_config(copy, gumbel_loc=1.0, gumbel_scale=2.0)
    model = load_langflow(copy)
    schedule = model.config.schedule
    assert model.schedule.describe() == pytest.approx(schedule)
    assert schedule["kind"] == "gumbel"
    assert schedule["loc"] == pytest.approx(4.9563, abs=1e-6)
    assert schedule["scale"] == pytest.approx(0.9637, abs=1e-6)
    assert schedule["cutoff"] == 1e-5


def test_it_survives_saving_and_loading(
    model: ConvergeFlowModel, expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    again = ConvergeFlowModel.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(
            again(expected["x"], expected["gamma"]).logits,
            model(expected["x"], expected["gamma"]).logits,
            atol=0,
            rtol=0,
        )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda w: w.pop("backbone.blocks.1.norm2.weight"), "missing: backbone.blocks.1.norm2.weight"),
        (lambda w: w.update(extra=torch.zeros(1)), "unexpected: extra"),
        (
            lambda w: w.update({"backbone.output_layer.linear.bias": torch.zeros(210)}),
            "mis-shaped: backbone.output_layer.linear.bias is (210,), not (211,)",
        ),
        (
            lambda w: w["backbone.self_cond_proj.weight"].fill_(float("nan")),
            "not finite: backbone.self_cond_proj.weight",
        ),
        (lambda w: w["backbone.rotary_emb.inv_freq"].mul_(2), "rotary"),
        (lambda w: w["proposal.scale"].neg_(), "proposal.scale"),
    ],
    ids=["missing", "unexpected", "mis-shaped", "not finite", "rotary base", "negative scale"],
)
def test_other_weights_are_refused_by_name(
    copy: Path, change: Callable[[dict[str, torch.Tensor]], object], complaint: str
) -> None:
    change_weights(copy, change)
    with pytest.raises(UserError) as refusal:
        load_langflow(copy)
    assert complaint in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"n_blocks": 3}, "missing: backbone.blocks.2."),
        ({"hidden_size": 32}, "mis-shaped"),
        ({"n_heads": 2}, "mis-shaped: backbone.rotary_emb.inv_freq"),
        ({"model_type": "gpt2"}, "'gpt2', not LangFlow"),
        ({"use_bias": False}, "use_bias=false"),
        ({"self_conditioning": False}, "self_conditioning=false"),
        ({"vocab_size": None}, "not a LangFlow configuration"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_configuration_is_refused(copy: Path, values: dict[str, object], complaint: str) -> None:
    change_config(copy, **values)
    with pytest.raises(UserError) as refusal:
        load_langflow(copy)
    assert complaint in str(refusal.value)


def test_a_torn_file_and_a_missing_one_are_refused(copy: Path) -> None:
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="is damaged"):
        load_langflow(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        load_langflow(copy)
    with pytest.raises(UserError, match="neither a folder nor a hub repository"):
        load_langflow(copy / "config.json")


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*arguments: object, **options: object) -> str:
        raise OSError("cannot reach the hub\nsecond line")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(ConvergeFlowError, match="cannot reach the hub") as failure:
        load_langflow("nobody/nothing")
    assert "\n" not in str(failure.value)


def test_a_hub_name_is_downloaded(monkeypatch: pytest.MonkeyPatch, model: ConvergeFlowModel) -> None:
    import huggingface_hub

    asked = []

    def download(repository: str, name: str, revision: str | None = None) -> str:
        asked.append((repository, name, revision))
        return str(TINY / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    imported = load_langflow("owner/name", revision="v1")
    assert asked == [("owner/name", "config.json", "v1"), ("owner/name", "model.safetensors", "v1")]
    assert torch.equal(imported.network.head.weight, model.network.head.weight)
