"""`convergeflow generate` as a user runs it: golden samples, files that survive a kill, traces, known text."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convergeflow.cli.main import main
from convergeflow.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "sampler.json").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("imported") / "tiny"
    assert main(["import", "langflow", str(GOLDEN / "langflow_tiny"), "--out", str(folder), "--tokenizer", "none"]) == 0
    return str(folder)


def run(*words: str) -> None:
    assert main(["generate", *words]) == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"case{case['case']}")
def test_golden_samples_through_the_command_line(
    model: str, case: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden, number = np.load(GOLDEN / "sampler.npz"), case["case"]
    np.save(tmp_path / "noise.npy", golden[f"noise_{number}"])
    run(
        "--model",
        model,
        "--noise",
        str(tmp_path / "noise.npy"),
        "--nfe",
        str(case["nfe"]),
        "--refine",
        str(case["K"]),
        "--scg",
        str(case["w_scg"]),
        "--ug",
        str(case["w_ug"]),
        "--schedule",
        case["configuration"],
        "--decode",
        "weight",
        "--logits",
        str(tmp_path / "logits.npy"),
        "--json",
    )
    shown = json.loads(capsys.readouterr().out)
    assert [sample["ids"] for sample in shown["samples"]] == golden[f"tokens_{number}"].tolist()
    assert shown["nfe"] == case["network_calls"]
    assert np.abs(np.load(tmp_path / "logits.npy") - golden[f"final_logits_{number}"]).max() < 1e-2


def test_files_do_not_depend_on_batches_or_json(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, batch in (("a", "2"), ("b", "5")):
        run("--model", model, "--num", "5", "--nfe", "8", "--batch", batch, "--out", str(tmp_path / name))
    capsys.readouterr()
    run("--model", model, "--num", "5", "--nfe", "8", "--json")
    shown = json.loads(capsys.readouterr().out)["samples"]
    a, b = ([json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in "ab")
    assert [line["ids"] for line in a] == [line["ids"] for line in b] == [line["ids"] for line in shown]
    assert [line["seed"] for line in a] == list(range(5))
    assert all(line["nfe"] == 8 and line["settings"]["nfe"] == 8 and line["text"] is None for line in a)
    run("--model", model, "--num", "7", "--nfe", "8", "--batch", "2", "--out", str(tmp_path / "a"))
    assert main(["generate", "--model", model, "--num", "7", "--nfe", "8", "--out", str(tmp_path / "b")]) == 2
    assert "was made with other settings (batch 5)" in capsys.readouterr().err


def test_a_killed_run_goes_on_without_losing_or_repeating_a_sample(model: str, tmp_path: Path) -> None:
    words = ["--model", model, "--num", "48", "--nfe", "64", "--batch", "4"]
    run(*words, "--out", str(tmp_path / "whole"))
    target = tmp_path / "killed"
    command = [sys.executable, "-m", "convergeflow", "generate", *words, "--out", str(target)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (target.exists() and target.stat().st_size > 1000) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = target.read_text().count("\n")
    assert done > 0, "nothing was written before the kill"
    run(*words, "--out", str(target))
    assert target.read_bytes() == (tmp_path / "whole").read_bytes()


def test_temperature_is_an_option_of_every_system_that_has_one() -> None:
    from convergeflow.cli.sampling_options import SamplingOptions, sample_arguments
    from convergeflow.systems import METHODS

    def made(name: str, **given: Any) -> dict[str, Any]:
        config = METHODS[name].config_class.of_size("test", vocabulary=31, length=8)
        return sample_arguments(METHODS[name](config), SamplingOptions(**given), {})

    assert made("mdlm", temperature=0.8, nfe=8) == {"nfe": 8, "temperature": 0.8}
    with pytest.raises(UserError, match="mdlm does not know `scg`"):
        made("mdlm", temperature=0.8, scg=2.0)
    with pytest.raises(UserError, match="elf does not know `temperature`"):
        made("elf", temperature=0.8)


def test_two_processes_write_what_one_writes(model: str, tmp_path: Path) -> None:
    # -n, not --num: torchrun takes that for an option of its own
    words = ["generate", "--model", model, "-n", "10", "--nfe", "8", "--batch", "2"]
    assert main([*words, "--out", str(tmp_path / "one")]) == 0
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        "29631",
        "-m",
        "convergeflow",
        *words,
        "--out",
        str(tmp_path / "two"),
    ]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    # 5 batches of 2: the first process makes three of them, so that a single process would have said 10.
    assert "6 made by this process" in done.stderr
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()


def test_a_trace_is_written_and_drawn(model: str, tmp_path: Path) -> None:
    run("--model", model, "--num", "3", "--nfe", "12", "--batch", "2", "--trace", str(tmp_path / "trace"))
    arrays = np.load(tmp_path / "trace" / "trace.npz")
    assert arrays["token"].shape == arrays["nearest"].shape == (6, 3, 24)
    assert (np.diff(arrays["log_snr"]) > 0).all()
    assert (arrays["second"] >= arrays["nearest"]).all()
    assert ((arrays["weight"] > 0) & (arrays["weight"] <= 1)).all()
    assert len((tmp_path / "trace" / "trace.csv").read_text().splitlines()) == 7
    assert (tmp_path / "trace" / "trace.png").stat().st_size > 10_000


def test_known_text_needs_a_tokenizer(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", model, "--prompt", "Once"]) == 2
    assert "tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--infill", "no gap"], "tokenizer"),
        (["--nfe", "3", "--refine", "100", "--schedule", "B"], "raise --nfe to"),
        (["--preset", "headlin"], "did you mean 'headline'"),
        (["--grid", "nowhere.npy"], "does not exist"),
        (["--freeze-weight", "0.9"], "without --freeze"),
        (["--self-condition", "previous", "--scg", "3"], "recursive self-conditioning only"),
        (["--set", "temperature=0.5"], "temperature"),
        (["--precision", "float16"], "'float32', 'float64'"),
    ],
)
def test_mistakes_are_one_line_with_the_fix(
    model: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", model, *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and said in error


def test_the_folder_of_a_replay_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--num", "1", "--nfe", "4", "--replay", str(tmp_path / "new" / "x.html")]) == 0
    assert "<html" in (tmp_path / "new" / "x.html").read_text()
    assert main(["generate", "--num", "1", "--replay", str(tmp_path)]) == 2
    assert "is a folder: give the name of a file" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="nobody can write into /proc, root neither")
@pytest.mark.parametrize("option", ["logits", "replay", "trace", "out"])
def test_a_folder_that_takes_no_files_is_refused_before_the_work(
    model: str, option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convergeflow.zoo.load_model", lambda *_, **__: pytest.fail("work was done"))
    assert main(["generate", "--model", model, "--nfe", "4", f"--{option}", "/proc/made"]) == 2
    assert "cannot write into /proc" in capsys.readouterr().err


def test_left_to_right_the_calls_are_those_that_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    run("--model", "stories-ar", "--num", "1", "--length", "6")
    told = capsys.readouterr().err
    assert "NFE 6\n" in told and "6 network calls each" in told


@pytest.mark.parametrize("option", ["--replay", "--logits"])
def test_a_text_of_the_user_is_not_overwritten(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("My only copy.")
    assert main(["generate", "--num", "1", option, str(mine)]) == 2
    assert f"{option} would overwrite" in capsys.readouterr().err
    assert mine.read_text() == "My only copy."


def test_a_gap_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (["--infill", "Once ____ girl"], "three underscores"),
        (["--prompt", "Once there was a ___ girl"], "--infill"),
    ):
        assert main(["generate", "--num", "1", *words]) == 2
        said = capsys.readouterr().err
        assert says in said and "vocabulary" not in said
