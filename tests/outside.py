"""The package as other people have it: the built wheel in an empty environment, used from an empty folder.

    python tests/outside.py

Builds the wheels of the package and of `examples/plugins`, installs both into a fresh environment (everything else is
borrowed from the environment that runs this), and there runs the first command of a newcomer, every example of
docs/extending.md, a folder of the hub with `trust_remote_code`, and a local task of lm-evaluation-harness. There is no
network.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILT_FROM = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "src")


class Outside:
    """A folder with an environment, in which things are run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir()
        self.python = folder / "env" / "bin" / "python"

    def prepare(self) -> None:
        """The wheels, and the environment that they are installed in."""
        source = self.folder / "source"
        source.mkdir()
        for name in BUILT_FROM:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, source / name)
        shutil.copytree(ROOT / "examples" / "plugins", self.folder / "plugins")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        for project in (source, self.folder / "plugins"):
            where = ["--wheel-dir", str(self.folder / "wheels"), str(project)]
            run([*pip, "wheel", "--no-deps", "--no-build-isolation", *where])
        run([sys.executable, "-m", "venv", "--without-pip", str(self.folder / "env")])
        wheels = sorted(map(str, (self.folder / "wheels").glob("*.whl")))
        run([*pip, "--python", str(self.python), "install", "--no-deps", "--no-index", *wheels])
        (own,) = (self.folder / "env" / "lib").glob("python*/site-packages")
        (own / "borrowed.pth").write_text(borrowed() + "\n")

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_", "VIRTUAL"))}
        offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
        places = {"CONVERGEFLOW_CACHE": str(self.folder / "cache"), "HF_HOME": str(self.folder / "hf")}
        return kept | offline | places

    def script(self, code: str, *words: str) -> str:
        """What a Python program prints there."""
        return run([str(self.python), "-c", code, *words], cwd=self.home, env=self.environment())

    def command(self, *words: str) -> str:
        """What `convergeflow ...` prints there."""
        line = [str(self.folder / "env" / "bin" / "convergeflow"), *words]
        return run(line, cwd=self.home, env=self.environment())

    # --- what is tried ---

    def first_command(self) -> None:
        """The package is the installed one, and a newcomer's first command works."""
        place = self.script("import convergeflow; print(convergeflow.__file__)").strip()
        assert Path(place).is_relative_to(self.folder / "env"), f"not the wheel: {place}"
        made = json.loads(self.command("generate", "--num", "1", "--json"))["samples"][0]
        assert made["settings"]["temperature"] == 0.3, "the model's own preset"
        assert self.command("generate", "--num", "1").splitlines()[0] == "--- seed 0"

    def settings_of_others(self) -> None:
        """A solver, a grid and a guidance schedule of another package, by name."""
        assert "adams" in self.command("list", "solvers") and "late" in self.command("list", "grids")
        assert "window" in self.command("list", "guidance") and "zip" in self.command("list", "scorers")
        words = [
            "--preset",
            "standard",
            "--solver",
            "adams",
            "--grid",
            "late",
            "--scg",
            "2",
            "--scg-schedule",
            "window",
        ]
        made = json.loads(self.command("generate", *words, "--num", "1", "--nfe", "8", "--json"))["samples"][0]
        assert made["settings"]["solver"] == "adams" and made["settings"]["grid"] == "late"
        assert made["settings"]["controls"]["scg_schedule"] == "window"
        effective = set(made["settings"]["plan"]["effective_scg"])
        assert effective == {0.0, 2.0}, f"none in the noise, all near the data: {effective}"

    def system_corpus_schedule(self) -> None:
        """A corpus is prepared, and a system and a flow with another schedule are trained on it."""
        cut = ["--tokenizer", "word", "--vocabulary", "16", "--length", "16", "--out", "counted"]
        self.command("prepare", "counting", *cut)
        steps = ["stages.ce.steps=40", "stages.mse.steps=2", "batch=8", "corpus.name=counted", "corpus.length=16"]
        self.command("train", "test", *steps, "--method", "bigram", "--out", "bigram")
        assert "One" in self.command("generate", "--model", "bigram", "--num", "8")
        power = ["model.schedule.kind=power", "model.schedule.power=3", "stages.ce.learn_schedule=false"]
        self.command("train", "test", *steps[1:], "stages.ce.steps=6", *power, "--out", "power")
        described = json.loads((self.home / "power" / "model" / "config.json").read_text())
        assert described["schedule"] == {"kind": "power", "power": 3.0}
        self.command("generate", "--model", "power", "--num", "1", "--nfe", "4")

    def scorer(self) -> None:
        """A scorer judges."""
        words = ["stories-small", "--num", "4", "--nfe", "4", "--scorer", "zip", "--json"]
        assert json.loads(self.command("evaluate", *words))["scorer"] == "zip"

    def hub_folder(self) -> None:
        """A folder of the hub opens with trust_remote_code, by people who never import this package."""
        write = (
            "from convergeflow.interop.hub import export; import convergeflow as cf; m = cf.load(); export(m, 'hub');"
        )
        told = self.script(f"{write} print(m.generate(seed=3, nfe=9).texts[0])").strip()
        read = (
            "from transformers import AutoModel, AutoTokenizer; how = dict(trust_remote_code=True);"
            "t = AutoTokenizer.from_pretrained('hub', **how); m = AutoModel.from_pretrained('hub', **how);"
            "print(t.decode(m.generate(seed=3, nfe=9).ids[0]))"
        )
        assert self.script(read).strip() == told

    def harness(self) -> None:
        """lm-evaluation-harness runs a task from a file."""
        if importlib.util.find_spec("lm_eval") is None:
            print("  not run: the extra lm-eval is not installed")
            return
        module = importlib.util.spec_from_file_location("lm_eval_task", ROOT / "tests" / "interop" / "lm_eval_task.py")
        assert module is not None and module.loader is not None
        task = importlib.util.module_from_spec(module)
        module.loader.exec_module(task)
        task.write_task(self.home)
        words = ["--model", "convergeflow", "--model_args", "pretrained=stories-small,repeats=16,greedy=False"]
        words += ["--tasks", task.NAME, "--include_path", ".", "--output_path", "harness"]
        line = [str(self.python), "-m", "convergeflow.interop.lm_eval", "run", *words]
        run(line, cwd=self.home, env=self.environment())
        (record,) = (self.home / "harness").rglob("results_*.json")
        assert json.loads(record.read_text())["results"][task.NAME]["acc,none"] == 1.0
        found = self.script(
            "from importlib.metadata import entry_points as e; print(e(group='lm_eval.models')['convergeflow'])"
        )
        assert "ConvergeFlowLM" in found


def borrowed() -> str:
    """Where the packages of this environment lie."""
    import torch

    return str(Path(torch.__file__).parents[1])


def run(line: list[str], **how: object) -> str:
    done = subprocess.run(line, capture_output=True, text=True, stdin=subprocess.DEVNULL, **how)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(line)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    printed: str = done.stdout
    return printed


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        outside = Outside(Path(folder).resolve())
        parts: list[Callable[[], None]] = [
            outside.prepare,
            outside.first_command,
            outside.settings_of_others,
            outside.system_corpus_schedule,
            outside.scorer,
            outside.hub_folder,
            outside.harness,
        ]
        for part in parts:
            began = time.perf_counter()
            print(part.__doc__, flush=True)
            part()
            print(f"  done in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
