"""What a user sees when a command works, fails, is mistyped or is interrupted."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from convergeflow.cli import main as command_line
from convergeflow.errors import ConvergeFlowError, UserError


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = command_line.main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real handler around a small application with every kind of ending."""

    def build() -> Any:
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.callback(invoke_without_command=True)(command_line._root)

        @app.command()
        def works(samples: int = typer.Option(3, "--samples", min=1), base_size: int = 1) -> None:
            if base_size < 1:
                raise UserError("`base_size` must be 1 or more, or give `samples`, not `nonsense` or `samples too`")
            print(f"made {samples}")

        @app.command()
        def fails(kind: str) -> None:
            raise {
                "user": UserError("the vocabulary is 7, not 9;\n use the tokenizer of the checkpoint"),
                "ours": ConvergeFlowError("the disk went away"),
                "peer": RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:537] Connection reset by peer"),
                "cpu memory": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"),
                "gpu memory": torch.OutOfMemoryError("CUDA out of memory. Tried 8 bytes"),
                "file": FileNotFoundError(2, "No such file or directory", "corpus.txt"),
                "bug": ZeroDivisionError("surprise"),
                "stop": KeyboardInterrupt(),
            }[kind]

        @app.command()
        def ends() -> None:
            raise typer.Exit(1)

        return typer.main.get_command(app)

    monkeypatch.setattr(command_line, "build", build)


def test_result_on_stdout_and_code_zero(toy: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "works", "--samples", "5") == (0, "made 5\n", "")


def test_a_command_may_choose_its_exit_code(toy: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "ends")[0] == 1


@pytest.mark.parametrize(
    ("kind", "code", "line"),
    [
        ("user", 2, "error: the vocabulary is 7, not 9; use the tokenizer of the checkpoint"),
        ("ours", 1, "error: the disk went away"),
        (
            "peer",
            1,
            "error: another process of this command ended or cannot be reached, so this one stops too; the other's "
            "last line says why. Start all of them again with the same command (`train` goes on with --resume)",
        ),
        (
            "cpu memory",
            2,
            "error: too little memory: give a smaller --batch (DefaultCPUAllocator: can't allocate memory: you tried "
            "8 bytes)",
        ),
        ("gpu memory", 2, "error: too little memory: give a smaller --batch (CUDA out of memory. Tried 8 bytes)"),
        ("file", 1, "error: no such file or directory: corpus.txt"),
        ("bug", 1, "error: internal error: ZeroDivisionError('surprise') (run with --debug for the traceback)"),
        ("stop", 130, "stopped"),
    ],
)
def test_every_failure_is_one_line(
    toy: None, capsys: pytest.CaptureFixture[str], kind: str, code: int, line: str
) -> None:
    assert run(capsys, "fails", kind) == (code, "", line + "\n")


def test_a_setting_in_backticks_is_shown_as_the_flag_of_the_running_command(
    toy: None, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, err = run(capsys, "works", "--base-size", "0")
    assert err == "error: --base-size must be 1 or more, or give --samples, not `nonsense` or `samples too`\n"


@pytest.mark.parametrize("words", [("--debug", "fails", "bug"), ("fails", "bug", "--debug")])
def test_debug_shows_the_traceback_wherever_it_stands(
    toy: None, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    code, _, err = run(capsys, *words)
    assert code == 1
    assert "Traceback (most recent call last)" in err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("wroks",), "unknown command 'wroks'; did you mean works?"),
        (("works", "--sample", "3"), "unknown option --sample; did you mean --samples?"),
        (("works", "--samples", "0"), "--samples"),
        (("works", "--samples", "many"), "--samples"),
        (("works", "extra"), "extra"),
        (("fails",), "kind"),
    ],
)
def test_a_usage_mistake_is_one_line_that_names_the_fix(
    toy: None, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], hint: str
) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert hint.lower() in err.lower()
    assert "--help" in err


def test_an_empty_word_is_no_path(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "train", "test", "--out", "")
    assert (code, out) == (2, "")
    assert err == "error: an empty word follows --out: was a variable of the shell not set?\n"


@pytest.mark.parametrize("words", [["list"], ["list", "presets"], ["reproduce", "--list", "--json"]], ids=" ".join)
def test_a_reader_that_goes_away_sees_no_traceback(words: list[str]) -> None:
    command = [sys.executable, "-m", "convergeflow", *words]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=buffered) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # as `head` does
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_no_word_shows_the_help_and_version_prints(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert "Usage: convergeflow" in out
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("convergeflow ")


def test_commands_stand_in_the_agreed_order(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--help")
    listed = [line.split()[0] for line in out.split("Commands:")[1].splitlines() if line.startswith("  ")]
    shown = [word for word in listed if word in command_line.COMMANDS]
    assert shown == [word for word in command_line.COMMANDS if word in shown]
    assert "import" in shown


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in command_line.COMMANDS:
        code, out, _ = run(capsys, name, "--help")
        assert code == 0
        assert "Example" in out, f"the help of {name} has no example"
        assert f"convergeflow {name}" in out


HEAVY = {"torch", "transformers", "matplotlib", "scipy", "numpy", "accelerate", "datasets", "rich", "pandas"}


def imported(*words: str) -> set[str]:
    """The packages that a command loads, in a process of its own."""
    program = (
        "import sys, json; from convergeflow.cli.main import main; code = main(json.loads(sys.argv[1]));"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})), file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-c", program, json.dumps(words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_the_console_script_and_the_module_are_the_same_command() -> None:
    script = Path(sys.executable).with_name("convergeflow")
    by_script = subprocess.run([str(script), "--version"], capture_output=True, text=True, check=True)
    by_module = subprocess.run(
        [sys.executable, "-m", "convergeflow", "--version"], capture_output=True, text=True, check=True
    )
    assert by_script.stdout == by_module.stdout


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in command_line.COMMANDS)], ids=" ".join)
def test_help_is_light(words: list[str]) -> None:
    """Reading the help must not load torch, which takes seconds."""
    assert not imported(*words) & HEAVY


@pytest.mark.parametrize("kind", ["models", "methods", "corpora", "scorers", "recipes", "presets", "grids", "solvers"])
def test_names_are_listed_without_loading_what_they_name(kind: str) -> None:
    assert not imported("list", kind) & HEAVY


def test_everything_is_listed_without_loading_what_it_names() -> None:
    assert not imported("list") & HEAVY


def test_what_is_listed_says_what_it_is_and_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(run(capsys, "list", "--json")[1])
    for kind in ("models", "methods", "corpora", "scorers", "recipes", "grids", "solvers", "guidance"):
        assert all(listed[kind].values()), kind
    assert listed["recipes"]["stories"] == "the stories of the package, an hour of one core: convergeflow train stories"
    assert listed["recipes"]["swift"].endswith("minutes of one core: convergeflow distill TEACHER --recipe swift")


def test_generate_loads_only_what_it_needs() -> None:
    loaded = imported("generate", "--num", "1", "--nfe", "2")
    assert not loaded & {"transformers", "matplotlib", "scipy", "accelerate", "datasets", "rich", "pandas"}


def test_training_that_needs_too_much_memory_is_told_what_helps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def full(*words: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("convergeflow.training.run.train", full)
    code, out, err = run(capsys, "train", "test", "--out", str(tmp_path / "run"))
    assert code == 2 and not out
    assert err.splitlines()[-1].startswith(
        "error: too little memory: give accumulate= twice its number, then recompute"
    )


def test_threads_wait_without_spinning_unless_the_user_says_otherwise() -> None:
    """What the thread library says of itself in a process that began as a command."""
    code = "import sys; from convergeflow.cli.main import main; main(['list', '--json']); import torch"
    for given, policy in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        environment |= {"OMP_DISPLAY_ENV": "TRUE"} | ({} if given is None else {"OMP_WAIT_POLICY": given})
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr


@pytest.mark.skipif(sys.platform != "linux" or not platform.libc_ver()[0], reason="mallopt belongs to glibc")
def test_a_large_tensor_takes_the_memory_of_the_last_one_unless_the_user_says_otherwise() -> None:
    """Counted in pages that the system hands out for tensors of 64 MB, one after the other, after a few."""
    code = """if True:
        import resource
        from convergeflow.cli.main import main
        main(["list", "solvers"])
        import torch
        for number in range(32):
            if number == 16:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.ones(2**24)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    pages = []
    for given in ({}, {"MALLOC_ARENA_MAX": "1"}):
        done = subprocess.run(
            [sys.executable, "-c", code], env=plain | given, capture_output=True, text=True, check=True
        )
        pages.append(int(done.stdout.split()[-1]))
    ours, theirs = pages
    assert 4 * ours < theirs
