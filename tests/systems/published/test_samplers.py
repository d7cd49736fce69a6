"""The authors' samplers, replayed: recorded random numbers in, their tokens and latents out.

The numbers under tests/golden/peers are of the projects' own code. Where there is no recording, the oracle is a closed
form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from convergeflow.errors import UserError
from convergeflow.interop.peers import Wanted, load_peer
from convergeflow.randomness import RowDraws
from convergeflow.sampling.wrappers import Clamp
from convergeflow.systems import IMPORTED, rival
from convergeflow.systems.published.family import SinglePrecision

PEERS = Path(__file__).resolve().parents[2] / "golden" / "peers"
Replay = Callable[..., None]


def golden(name: str) -> dict[str, Tensor]:
    with np.load(PEERS / name, allow_pickle=False) as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files}
    return {key: value.long() if value.dtype == torch.int32 else value for key, value in arrays.items()}


def model_of(peer: str, source: str, **wanted: Any) -> Any:
    return load_peer(PEERS / source, Wanted(peer, length=16, **wanted)).model


class Recorded(RowDraws):
    """Random numbers that were written down, in the order in which they are asked for."""

    def __init__(self, uniform: Sequence[Tensor], normal: Sequence[Tensor]) -> None:
        super().__init__([])
        self.queues = {"uniform": list(uniform), "normal": list(normal)}

    def __len__(self) -> int:
        return 2

    def _next(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        found = self.queues[kind].pop(0)
        assert found.shape == (2, *shape)
        return found.to(dtype)

    def log_exponential(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return self._next("uniform", shape, torch.float64).log().neg().log().to(dtype)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._next("normal", shape, dtype).clone()


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Replay:
    """Give the next sampler these numbers, and check afterwards that it took all of them."""
    made: list[Recorded] = []

    def numbers(uniform: Sequence[Tensor] = (), normal: Sequence[Tensor] = ()) -> None:
        made.append(Recorded(uniform, normal))
        monkeypatch.setattr(rival, "RowDraws", lambda seeds, *device: made[-1])

    yield numbers  # type: ignore[misc]
    assert all(not queue for draws in made for queue in draws.queues.values())


def choosing(tokens: Tensor, classes: int) -> Tensor:
    """Uniform numbers that make an even race end at these tokens."""
    return torch.full((*tokens.shape, classes), 0.1).scatter(-1, tokens[..., None], 0.9)


def ids_of(model: Any, nfe: int, **controls: Any) -> Tensor:
    return model.sample(2, 16, seeds=[0, 1], nfe=nfe, **controls).ids


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_duo_with_both_tails(replay: Replay, precision: str) -> None:
    model, g = model_of("duo", "duo/hf"), golden("duo/forward.npz")
    start = choosing(g["sampler_x_init"], 101)
    replay([start, *g["sampler_u"], torch.full((2, 16, 101), 0.5)])
    assert torch.equal(ids_of(model, 5, removal="greedy", precision=precision), g["sampler_tokens_greedy"])
    replay([start, *g["sampler_u"], g["sampler_u_ancestral_tail"]])
    assert torch.equal(ids_of(model, 5, precision=precision), g["sampler_tokens_ancestral"])


def test_duo_posterior() -> None:
    from convergeflow.systems.duo import reverse_law

    model, g = model_of("duo", "duo/hf"), golden("duo/forward.npz")
    for row in range(3):
        now, then = g["alpha_t"][row, 0].double(), g["alpha_s"][row, 0].double()
        law = reverse_law(model.log_x(g["xt"][row, None], now[None]).double(), g["xt"][row, None], now, then)
        torch.testing.assert_close(law.exp().float()[0].detach(), g["posterior_ema"][row], rtol=0, atol=1e-5)


def test_mdlm_cached(replay: Replay) -> None:
    model, g = model_of("mdlm", "mdlm/hf"), golden("mdlm/forward.npz")
    controls = {"predictor": "cached", "removal": "greedy"}
    for precision in ("float64", "float32"):
        replay([*g["sampler_u"], torch.full((2, 16, 100), 0.5)])
        assert torch.equal(ids_of(model, 5, precision=precision, **controls), g["sampler_tokens"])


def test_mdlm_does_not_call_again_before_a_token_changed() -> None:
    model = model_of("mdlm", "mdlm/hf")
    cached = model.sample(2, 16, seeds=[0, 1], nfe=200, predictor="cached")
    ancestral = model.sample(2, 16, seeds=[0, 1], nfe=200)
    assert cached.nfe <= 16 * 2 + 2 < ancestral.nfe == 200
    assert int(cached.ids.max()) < model.mask and int(ancestral.ids.max()) < model.mask


def test_mdlm_semi_autoregressive_text_keeps_what_it_has() -> None:
    model = model_of("mdlm", "mdlm/hf")
    controls = {"nfe": 9, "predictor": "cached", "removal": "greedy"}
    short = model.sample(2, 16, seeds=[0, 1], **controls)
    long = model.sample(2, 16 + 2 * 6, seeds=[0, 1], stride=6, **controls)
    assert long.ids.shape == (2, 28) and torch.equal(long.ids[:, :16], short.ids)
    assert int(long.ids.max()) < model.mask
    with pytest.raises(UserError, match="so many strides"):
        model.sample(2, 17, seeds=[0, 1], stride=6, **controls)


@pytest.mark.parametrize("graph", ["absorb", "uniform"])
@pytest.mark.parametrize("step", ["euler", "analytic"])
def test_sedd(replay: Replay, graph: str, step: str) -> None:
    model, g = model_of("sedd", f"sedd/{graph}/hf"), golden(f"sedd/{graph}/forward.npz")
    start = [] if graph == "absorb" else [choosing(g[f"pc_{step}_init"], 101)]
    for precision in ("float64", "float32"):
        replay([*start, *g[f"pc_{step}_u"], g[f"pc_{step}_u_denoise"]])
        assert torch.equal(ids_of(model, 5, step=step, precision=precision), g[f"pc_{step}_tokens"])


def test_sedd_of_the_mdlm_repository(replay: Replay) -> None:
    model, g = model_of("sedd", "mdlm/sedd_plain.ckpt"), golden("mdlm/sedd_forward.npz")
    replay([*g["sampler_u"][:4], g["sampler_u"][4][..., :100]])
    assert torch.equal(ids_of(model, 5), g["sampler_tokens"])


def test_ar(replay: Replay) -> None:
    model, g = model_of("ar", "mdlm/ar_plain.ckpt"), golden("mdlm/ar_forward.npz")
    # A race of exponential clocks is won where log p + Gumbel noise is largest: u = exp(-exp(-gumbel)).
    clocks = torch.exp(-torch.exp(-g["sampler_gumbel"].double()))[..., :100]
    for cache in (True, False):
        replay([clock[:, None] for clock in clocks.unbind(1)])
        drawn = model.sample(2, 16, seeds=[0, 1], cache=cache)
        assert torch.equal(drawn.ids, g["sampler_tokens"]) and drawn.nfe == 15


def test_ar_continues_a_prompt_and_keeps_to_the_nucleus() -> None:
    model = model_of("ar", "mdlm/ar_plain.ckpt")
    known = torch.zeros(2, 16, dtype=torch.bool)
    known[:, 1:4] = True
    tokens = torch.full((2, 16), 7)
    ids = model.sample(2, 16, seeds=[0, 1], clamp=Clamp(tokens, known)).ids
    assert ids[:, 0].tolist() == [model.begin] * 2 and (ids[:, 1:4] == 7).all()
    narrow = model.sample(2, 16, seeds=[0, 1], nucleus=1e-6).ids
    best = model(narrow).argmax(-1)
    assert torch.equal(narrow[:, 1:], best[:, :-1])


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_flm_and_its_flow_maps(replay: Replay, steps: int) -> None:
    cases = {
        ("flm", "flm/flm_plain.ckpt", steps): "flm/flm_forward.npz",
        ("fmlm", "fmlm/fmlm_double_plain.ckpt", steps): "fmlm/fmlm_double_forward.npz",
        ("fmlm", "fmlm/fmlm_distill_plain.ckpt", 2 * steps): "fmlm/fmlm_distill_forward.npz",
    }
    for (peer, source, nfe), file in cases.items():
        g = golden(file)
        teacher = {"teacher": str(PEERS / "flm/flm_plain.ckpt")} if "distill" in source else {}
        replay(normal=[g["sampler_z0"]])
        drawn = model_of(peer, source, **teacher).sample(2, 16, seeds=[0, 1], nfe=nfe)
        assert torch.equal(drawn.ids, g[f"sampler_tokens_{steps}"]), source
        assert drawn.nfe == nfe


@pytest.mark.parametrize("sampler", ["ode", "sde"])
def test_elf(replay: Replay, monkeypatch: pytest.MonkeyPatch, sampler: str) -> None:
    model, g = model_of("elf", "elf/ckpt"), golden("elf/forward.npz")
    monkeypatch.setattr(type(model), "_grid", lambda self, run, steps, kind: g["sampler_t_steps"].expand(2, -1))
    latents = []
    model.network.register_forward_pre_hook(lambda module, inputs: latents.append(inputs[0]))
    replay(normal=[g["sampler_z0"] / 2, *(g["sampler_sde_eps"] if sampler == "sde" else ())])
    drawn = model.sample(2, 16, seeds=[0, 1], nfe=5, sampler=sampler)
    torch.testing.assert_close(latents[-1], g[f"sampler_latent_{sampler}"], rtol=0, atol=1e-4)
    assert torch.equal(drawn.ids, g[f"sampler_tokens_{sampler}"]) and drawn.nfe == 5


def test_elf_guides_by_a_condition() -> None:
    from convergeflow.systems.published.elf import Given

    model, g = model_of("elf", "elf/ckpt"), golden("elf/forward.npz")
    given = Given(g["cond_seq"], g["cond_mask"].bool())
    run = rival.Run(16, RowDraws([0, 1]), 9, None, None, torch.device("cpu"))
    with torch.no_grad():
        z = model.flow(run, g["sampler_z0"], g["sampler_t_steps"].expand(2, -1), torch.ones(2), 0.0, given, 2.0)
    torch.testing.assert_close(z, g["cond_latent_ode_cfg2"], rtol=0, atol=1e-4)


def test_elf_reads_a_prompt_with_its_encoder() -> None:
    g = golden("elf/forward.npz")
    model = model_of("elf", "elf/ckpt", encoder=str(PEERS / "elf" / "t5-tiny"))
    whole = g["attention_mask"].bool().all(1)
    assert bool(whole.any())
    expected = g["t5_hidden_mask2d"][whole] / 0.2
    torch.testing.assert_close(model.encode(g["input_ids"][whole]), expected, rtol=0, atol=1e-4)
    for row, length in ((2, 5), (3, 3)):  # rows with a condition, which sees only itself in the authors' encoder
        condition = model.encode(g["input_ids"][row, None, :length])
        torch.testing.assert_close(condition[0], g["t5_hidden"][row, :length] / 0.2, rtol=0, atol=1e-4)
    known = torch.arange(16) < 5
    drawn = model.sample(2, 16, seeds=[0, 1], nfe=9, clamp=Clamp(g["input_ids"][0], known), text_guidance=2.0)
    assert torch.equal(drawn.ids[:, :5], g["input_ids"][:1, :5].expand(2, -1)) and drawn.nfe == 9


def test_elf_puts_back_noise_by_the_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("elf", "elf/ckpt")
    churned = []
    flow = type(model).flow
    monkeypatch.setattr(type(model), "flow", lambda self, *given: churned.append(given[4]) or flow(self, *given))
    for nfe in (9, 33, 65, 100):
        model.sample(1, 16, seeds=[0], nfe=nfe)
    assert churned == [1.5, 1.5, 1.0, 1.0]


def test_plaid(replay: Replay) -> None:
    model, g = model_of("plaid", "plaid/weights"), golden("plaid/forward.npz")
    for step in ("ancestral", "ddim"):
        replay(normal=[g["sampler_z1"], *g["sampler_noise"]])
        assert torch.equal(ids_of(model, 7, step=step), g[f"sampler_tokens_{step}"])


def test_single_precision_ends_the_noise_at_sixteen_nats() -> None:
    """Float32 uniforms end at 1 - 2^-24, so the Gumbel noise -log(-log u) ends at 24 log 2; float64 goes on."""
    clocks = SinglePrecision(RowDraws([0])).log_exponential(1 << 21)
    assert clocks.dtype == torch.float64 and torch.equal(clocks, clocks.float().double())
    assert float(-clocks.min()) <= 24 * np.log(2.0) + 1e-3
    assert len(torch.unique(clocks)) < len(torch.unique(RowDraws([0]).log_exponential(1 << 21)))


@pytest.mark.parametrize("name", IMPORTED)
def test_presets_are_settings_that_the_sampler_knows(name: str) -> None:
    kind: Any = IMPORTED[name]
    assert kind.method == name and kind.presets
    for preset in kind.presets.values():
        assert set(preset) <= {"nfe", *kind.controls}
        assert all(value in kind.choices[key] for key, value in preset.items() if key in kind.choices)


def test_presets_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from convergeflow.cli.main import main

    assert main(["import", "duo", str(PEERS / "duo" / "hf"), "--out", str(tmp_path / "duo")]) == 0
    capsys.readouterr()
    words = ["generate", "--model", str(tmp_path / "duo"), "--num", "2", "--json", "--preset", "greedy", "--nfe", "5"]
    assert main([*words, "--set", "nucleus=0.9"]) == 0
    settings = json.loads(capsys.readouterr().out)["samples"][0]["settings"]
    assert (settings["removal"], settings["nfe"], settings["nucleus"]) == ("greedy", 5, 0.9)
    assert main(["generate", "--model", str(tmp_path / "duo"), "--preset", "gredy"]) == 2
    assert "did you mean 'greedy'" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "duo")]) == 0
    assert "published, greedy, distilled-8" in capsys.readouterr().out


SOURCES = {
    "mdlm": "mdlm/hf",
    "duo": "duo/hf",
    "sedd": "sedd/uniform/hf",
    "ar": "mdlm/ar_plain.ckpt",
    "flm": "flm/flm_plain.ckpt",
    "fmlm": "fmlm/fmlm_double_plain.ckpt",
    "elf": "elf/ckpt",
    "plaid": "plaid",
}


@pytest.mark.parametrize("peer", SOURCES)
def test_other_number_formats_change_little(peer: str) -> None:
    """Float64 throughout, and a trunk in bfloat16 as on GPUs: outputs stay float32 there, and near."""
    model = model_of(peer, SOURCES[peer])
    tokens = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(0))
    noise = torch.randn(2, 16, 101, generator=torch.Generator().manual_seed(1))
    half = torch.full((2,), 0.5)
    inputs = {
        "ar": (tokens,),
        "flm": (noise, half),
        "fmlm": (noise, half, half + 0.2),
        "elf": (noise[..., :24], half, half),
        "plaid": (noise[..., :16], half),
    }.get(peer, (tokens, half))

    def outputs() -> tuple[Tensor, ...]:
        with torch.no_grad():
            found = model(*inputs)
        return found if isinstance(found, tuple) else (found,)

    plain = outputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = outputs()
    model.double()
    exact = outputs()
    for one, other, third in zip(plain, rounded, exact, strict=True):
        assert other.dtype == torch.float32
        scale = float(one.abs().max())
        assert float((one - other).abs().max()) < 0.1 * scale + 0.1
        torch.testing.assert_close(one.double(), third.double(), rtol=0, atol=2e-5 * scale + 1e-5)
