"""Published checkpoints through the command line: every recorded forward pass of the authors' own code is met.

The files under tests/golden/peers are tiny random models in each published layout, with inputs and outputs of the
projects' own code (see the README in each folder).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from convergeflow import zoo
from convergeflow.cli.main import main

PEERS = Path(__file__).resolve().parent.parent / "golden" / "peers"
CLOSE = {"rtol": 0.0, "atol": 1e-4}
Golden = dict[str, Tensor]
Load = Callable[..., Any]


def golden(name: str) -> Golden:
    with np.load(PEERS / name, allow_pickle=False) as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files}
    return {key: value.long() if value.dtype == torch.int32 else value for key, value in arrays.items()}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Import by the command line, then load the folder that it wrote."""

    def by_command(peer: str, source: str, *options: str) -> Any:
        out = tmp_path / f"{peer}-{len(list(tmp_path.iterdir()))}"
        assert main(["import", peer, str(PEERS / source), "--out", str(out), *options]) == 0
        return zoo.load_model(out, device="cpu")

    return by_command


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.detach().float(), expected, **CLOSE)


@pytest.mark.parametrize("which", ["raw", "ema"])
@pytest.mark.parametrize("file", ["mdlm_plain.ckpt", "mdlm_full.ckpt"])
def test_mdlm(load: Load, file: str, which: str) -> None:
    model, g = load("mdlm", f"mdlm/{file}", "--weights", which), golden("mdlm/forward.npz")
    near(model(g["xt"]), g[f"logits_{which}"])
    masked = g["xt"] == model.mask
    near(model.masked_nll(g["x0"], masked) * (g["dsigma"] / g["sigma"].expm1())[:, None], g[f"nll_{which}"])
    assert model.config.length == (16 if "full" in file else 1024)


def test_mdlm_of_the_hub(load: Load) -> None:
    model, g = load("mdlm", "mdlm/hf"), golden("mdlm/forward.npz")
    near(model(g["xt"]), g["logits_ema"])
    log_x = model.logits(g["xt"]).log_softmax(-1)
    masked = g["xt"] == model.mask
    near(log_x[masked], g["logprobs_ema"][masked][:, :-1])
    assert (model.config.length, model.config.vocabulary) == (16, 100)


@pytest.mark.parametrize(("source", "which"), [("duo_plain.ckpt", "raw"), ("duo_plain.ckpt", "ema"), ("hf", "ema")])
def test_duo(load: Load, source: str, which: str) -> None:
    from convergeflow.systems.duo import elbo

    model, g = load("duo", f"duo/{source}", "--weights", which), golden("duo/forward.npz")
    near(model(g["xt"], g["sigma"][:, 0]), g[f"logits_{which}"])
    log_x = model.log_x(g["xt"], g["alpha_t"][:, 0])
    near(log_x, g[f"logprobs_{which}"])
    alpha = g["alpha_t"].expand(g["xt"].shape)
    near(elbo(log_x, g["xt"], g["x0"], alpha, g["dalpha_t"].expand(alpha.shape)), g[f"nll_{which}"])
    if which == "ema":
        near(model(g["soft_input"], g["sigma"][:, 0]), g["soft_logits_ema"])
        sparse = golden("duo/forward_topk_main.npz")
        vectors = torch.zeros(3, 16, 101).scatter_add(-1, sparse["indices"], sparse["weights"])
        near(model.network(vectors, sparse["sigma"][:, 0]), sparse["logits_ema"])


@pytest.mark.parametrize(("source", "which"), [("local", "raw"), ("local", "ema"), ("hf", "ema")])
def test_sedd_absorb(load: Load, source: str, which: str) -> None:
    model, g = load("sedd", f"sedd/absorb/{source}", "--weights", which), golden("sedd/absorb/forward.npz")
    near(model(g["xt"], g["sigma"]), g[f"logscore_{which}"])
    masked = g["xt"] == model.mask
    near(model.log_scores(g["xt"], g["sigma"])[masked], g[f"logscore_{which}"][masked][:, :-1])
    assert model.method == "published-sedd-absorb"


def test_sedd_uniform(load: Load) -> None:
    from convergeflow.systems.sedd import uniform_loss

    model, g = load("sedd", "sedd/uniform/hf"), golden("sedd/uniform/forward.npz")
    log_score = model(g["xt"], g["sigma"])
    near(log_score, g["logscore_ema"])
    entropy = uniform_loss(log_score, g["xt"], g["x0"], g["sigma"][:, None].expand(3, 16))
    torch.testing.assert_close(entropy.detach(), g["score_entropy_ema"], rtol=1e-3, atol=1e-4)
    near(model.sigma(g["t"]), g["sigma"])


@pytest.mark.parametrize("which", ["raw", "ema"])
def test_sedd_of_the_mdlm_repository(load: Load, which: str) -> None:
    model, g = load("sedd", "mdlm/sedd_plain.ckpt", "--weights", which), golden("mdlm/sedd_forward.npz")
    near(model.network.whole(g["xt"], g["sigma"]), g[f"logits_{which}"])
    near(model(g["xt"], g["sigma"]), g[f"logscore_{which}"])


@pytest.mark.parametrize("which", ["raw", "ema"])
def test_ar(load: Load, which: str) -> None:
    model, g = load("ar", "mdlm/ar_plain.ckpt", "--weights", which), golden("mdlm/ar_forward.npz")
    near(model(g["tokens"])[..., :-1], g[f"logprobs_{which}"][..., :-1])
    near(model.row_losses(g["tokens"], torch.zeros(3), None), g[f"nll_{which}"].mean(-1))
    assert model.begin == int(g["bos_id"])


@pytest.mark.parametrize("which", ["raw", "ema"])
@pytest.mark.parametrize("file", ["flm_plain.ckpt", "flm_full.ckpt"])
def test_flm(load: Load, file: str, which: str) -> None:
    model, g = load("flm", f"flm/{file}", "--weights", which), golden("flm/flm_forward.npz")
    near(model(g["xt"], g["t"]), g[f"logits_{which}"])
    near(model.warp(g["alpha_grid"]).float(), g["gamma_of_alpha"])


@pytest.mark.parametrize("which", ["raw", "ema"])
def test_fmlm(load: Load, which: str) -> None:
    for file, options in {"distill": ("--teacher", str(PEERS / "flm/flm_plain.ckpt")), "double": ()}.items():
        model = load("fmlm", f"fmlm/fmlm_{file}_plain.ckpt", "--weights", which, *options)
        g = golden(f"fmlm/fmlm_{file}_forward.npz")
        near(model(g["xt"], g["t"], g["t_prime"]), g[f"logits_{which}"])
        if which == "ema":
            near(model.network.loss_weight(g["t"]), g["loss_weight_ema"])
        if options:
            near(model.network.teacher(g["xt"], g["t"]).log_softmax(-1), g["teacher_logprobs"])


@pytest.mark.parametrize("which", ["raw", "ema"])
@pytest.mark.parametrize("source", ["elf/ckpt/checkpoint_3", "elf-jax/ckpt/checkpoint_3"])
def test_elf(load: Load, source: str, which: str) -> None:
    model, g = load("elf", source, "--weights", which), golden("elf/forward.npz")
    common = (g["t"], g["sc_scale"])
    near(model(g["z"], *common, g["x_prev"])[0], g[f"x_pred_{which}"])
    near(model(g["z"], *common)[0], g[f"x_pred_nosc_{which}"])
    near(model(g["z"], *common, g["x_prev"], valid=g["attention_mask"])[0], g[f"x_pred_mask_{which}"])
    ones = torch.ones(4)
    x, logits = model(g["z"], ones, g["sc_scale"], torch.zeros_like(g["z"]), ones)
    near(x, g[f"x_pred_dec_{which}"])
    near(logits, g[f"decoder_logits_{which}"])


def test_plaid(load: Load) -> None:
    model, g = load("plaid", "plaid/weights"), golden("plaid/forward.npz")
    exact = golden("plaid/forward_float64.npz")
    gamma, _ = model.noise_schedule(exact["t_grid"])
    torch.testing.assert_close(gamma.detach(), exact["gamma_grid"], rtol=0, atol=1e-5)
    for suffix, previous in {"": None, "_selfcond": g["x_selfcond"]}.items():
        logits, x = model(g["z"], g["gamma"], previous)
        near(logits, g[f"logits{suffix}"])
        near(x, g[f"x_reconst{suffix}"])


def test_a_hub_folder_with_a_torch_file(load: Load, tmp_path: Path) -> None:
    folder = PEERS / "sedd" / "absorb" / "hf"
    (tmp_path / "hub").mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / "hub" / name).write_bytes((folder / name).read_bytes())
    model, g = load("sedd", str(tmp_path / "hub")), golden("sedd/absorb/forward.npz")
    near(model(g["xt"], g["sigma"]), g["logscore_ema"])


def test_what_is_written_is_what_was_read(load: Load, tmp_path: Path) -> None:
    """Imported weights go to a folder and come back bit for bit; half precision is computed in float32."""
    checkpoint = torch.load(PEERS / "duo" / "duo_plain.ckpt", weights_only=True)
    checkpoint["state_dict"] = {name: tensor.bfloat16() for name, tensor in checkpoint["state_dict"].items()}
    torch.save(checkpoint, tmp_path / "half.ckpt")
    model = load("duo", str(tmp_path / "half.ckpt"), "--weights", "raw")
    theirs = checkpoint["state_dict"]["backbone.blocks.1.attn_qkv.weight"]
    ours = model.network.backbone.blocks[1].attention.qkv.weight
    assert ours.dtype == torch.float32 and torch.equal(ours, theirs.float())
