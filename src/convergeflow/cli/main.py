"""The command line: which commands exist, and what a mistake looks like.

Every failure is one line on stderr. Exit codes: 0 done, 1 failed, 2 the user's mistake (the line names the fix),
130 stopped with Ctrl-C. `--debug`, anywhere on the line, shows the traceback of a failure. Nothing heavy is imported
here: `convergeflow --help` must answer at once.
"""

from __future__ import annotations

import ctypes
import difflib
import importlib
import inspect
import keyword
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer

from convergeflow import __version__
from convergeflow.cli.processes import lost_process, number_of_processes
from convergeflow.errors import ConvergeFlowError, UserError
from convergeflow.markup import printable

COMMANDS = (
    "fetch",
    "prepare",
    "train",
    "distill",
    "generate",
    "evaluate",
    "sweep",
    "tune",
    "compare",
    "blind",
    "reproduce",
    "serve",
    "inspect",
    "bench",
    "import",
    "list",
)
"""In the order of the help page. Each has a file in this folder, which is imported when the command is named."""

MORE_MEMORY = {
    "train": "give accumulate= twice its number, then recompute=true, then parallel=fsdp; --resume takes all three",
    "distill": "give batch= half its number",
    "prepare": "give --documents a smaller number",
}
"""What helps a command that runs out of memory, where it is not --batch."""

ELSEWHERE: dict[str | None, dict[str, str]] = {
    "train": {
        "length": "corpus.length",
        "text_field": "`convergeflow prepare --text-field`, and train on the folder that it makes",
    }
}
"""How a setting is given that is no option of a command."""

PLAIN: dict[str, Any] = {
    "rich_markup_mode": None,  # plain text: the same help on a screen, in a pipe and in the documentation
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class _Commands(Mapping[str, Any]):
    """Word -> command, imported when it is asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, word: str) -> Any:
        if word not in COMMANDS:
            raise KeyError(word)
        if word not in self._loaded:
            self._loaded[word] = _load(word)
        return self._loaded[word]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


def build() -> Any:
    """The application; no command is imported yet."""
    app = typer.Typer(name="convergeflow", **PLAIN)
    app.callback(invoke_without_command=True)(_root)
    group: Any = typer.main.get_group(app)
    group.commands = _Commands()
    return group


def _load(word: str) -> Any:
    """The command of a file, which holds a function named like the command, or a `typer.Typer` called `app` with parts.

    An underscore is behind the name where the plain name means something in Python.
    """
    module = importlib.import_module(
        f"convergeflow.cli.{word}_" if keyword.iskeyword(word) else f"convergeflow.cli.{word}"
    )
    parts = getattr(module, "app", None)
    around = typer.Typer(**PLAIN)
    around.callback()(lambda: None)
    if isinstance(parts, typer.Typer):
        for part in parts.registered_commands:
            for name, text in _help(part.callback).items():
                setattr(part, name, text)
        around.add_typer(parts, name=word, **_help(module))
    else:
        function = getattr(module, f"{word}_", None) or getattr(module, word)
        around.command(word, **_help(function))(function)
    return typer.main.get_group(around).commands[word]


def _help(documented: object) -> dict[str, Any]:
    """The docstring as help, and its first paragraph, which is one sentence, for lists of commands.

    What follows "Example" keeps its line breaks. Without a `short_help` the library would cut the sentence at the first
    full stop, or at the width of the screen.
    """
    text = inspect.getdoc(documented) or ""
    return {"help": re.sub(r"\n\n(?=Examples?\b)", "\n\n\b\n", text), "short_help": _one_line(text.split("\n\n")[0])}


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"convergeflow {__version__}")
        raise typer.Exit()


def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_show_version, is_eager=True),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback when something fails."),
) -> None:
    """Flow language models on your own machine: prepare text, train, generate, evaluate, reproduce.

    \b
    Example:
      convergeflow generate
      convergeflow train --help
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit()


def reuse_large_blocks() -> None:
    """Let the C library keep the memory of freed tensors for the next ones.

    glibc gives blocks above 32 MB back to the system at once. The next tensor of that size then pays for new pages,
    which takes longer than to compute a large vocabulary's logits. A user's own settings (MALLOC_...) stay as they are.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        m_trim_threshold, m_mmap_threshold = -1, -3  # their numbers in malloc.h
        library.mallopt(m_mmap_threshold, 2**30)
        library.mallopt(m_trim_threshold, 2**31 - 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # People add --debug to the end of the line that failed, so it is understood everywhere.
    options = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in options
    words = [word for word in options if word != "--debug"] + words[len(options) :]
    # Loading problems are reported by our own one line; transformers would print a table first.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Threads that spin while they wait take the cores from what they wait for, as soon as anything else runs here.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    reuse_large_blocks()
    application = build()
    try:
        for before, word in zip(["convergeflow", *words], words, strict=False):
            if not word:  # an empty path would be the present folder
                raise UserError(f"an empty word follows {before}: was a variable of the shell not set?")
        number_of_processes()
        code = application.main(words, prog_name="convergeflow", standalone_mode=False)
        if code == 130:  # how typer reports Ctrl-C
            return _fail("stopped", 130)
        return (code if isinstance(code, int) else 0) if _heard() else 1
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except typer.Abort:
        return _fail("stopped", 130)
    except typer.TyperException as mistake:
        return _fail(_describe(mistake), mistake.exit_code)
    except (ConvergeFlowError, OSError) as failure:
        if debug:
            traceback.print_exc()
        message = _with_flags(_describe_failure(failure), _named(application, words))
        return _fail(message, 2 if isinstance(failure, UserError) else 1)
    except BaseException as failure:
        # A panic inside a library of compiled code is no `Exception`, though nothing else deserves that.
        if not isinstance(failure, Exception) and type(failure).__name__ != "PanicException":
            raise
        if debug:
            traceback.print_exc()
        return _fail(*_describe_unforeseen(failure, words, debug))


def _heard() -> bool:
    """Whether somebody took all that was printed: who reads through `head` may have gone, and wants no traceback."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return False
    return True


def _fail(message: str, code: int) -> int:
    _heard()
    message = printable(message)
    print(f"error: {message}" if code != 130 else message, file=sys.stderr, flush=True)
    return code


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _describe_failure(failure: BaseException) -> str:
    if isinstance(failure, OSError) and failure.strerror and failure.filename is not None:
        return f"{failure.strerror.lower()}: {failure.filename}"
    return _one_line(str(failure)) or type(failure).__name__


def _describe_unforeseen(failure: BaseException, words: Sequence[str], debug: bool) -> tuple[str, int]:
    """What nobody checked for, and its exit code: memory and lost processes have a reason that we can name."""
    said = _one_line(str(failure))
    if isinstance(failure, UnicodeEncodeError) and not _is_text(failure.object):
        strange = next((word for word in words if not _is_text(word)), None)
        what = "a name or a text" if strange is None else repr(strange)
        return f"{what} is not UTF-8: write the text in UTF-8, or rename the file (`convmv -f latin1 -t utf8`)", 2
    if lost_process(failure):
        return (
            "another process of this command ended or cannot be reached, so this one stops too; the other's last line "
            "says why. Start all of them again with the same command (`train` goes on with --resume)"
        ), 1
    # PyTorch has a kind of error for accelerators, and only words for a CPU.
    named = any(kind.__name__ in ("OutOfMemoryError", "MemoryError") for kind in type(failure).__mro__)
    if named or re.search(r"out of memory|can't allocate memory|not enough memory", said):
        fix = MORE_MEMORY.get(next((word for word in words if word in MORE_MEMORY), ""), "give a smaller --batch")
        return f"too little memory: {fix} ({said[:160]})", 2
    more = "" if debug else " (run with --debug for the traceback)"
    return f"internal error: {_one_line(repr(failure))[:500]}{more}", 1


def _is_text(word: str) -> bool:
    """Whether the bytes of a word were UTF-8; others reach Python as halves of characters."""
    return not any("\ud800" <= letter <= "\udfff" for letter in word)


def _named(application: Any, words: Sequence[str]) -> Any:
    """The command, or the part of one, that the words of the command line name."""
    command = application
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    return command


def _with_flags(message: str, command: Any) -> str:
    """The message with flags in place of settings: the rooms below write `base_temperature`, users --base-temperature.

    A name in backticks that is no option of the command stays as it is.
    """
    flags = ELSEWHERE.get(command.name, {}) | {
        flag.removeprefix("--").replace("-", "_"): flag for flag in _flags(command)
    }
    return re.sub(r"`(\w+)`", lambda found: flags.get(found[1], found[0]), message)


def _describe(mistake: typer.TyperException) -> str:
    """A usage error as one line: what is wrong, the nearest right word, where to read on."""
    context = getattr(mistake, "ctx", None)
    message = _one_line(mistake.format_message()).rstrip(".")
    option = getattr(mistake, "option_name", None)
    if option is not None and message.startswith("No such option"):
        known = [] if context is None else _flags(context.command)
        message = f"unknown option {option}" + _nearest(option, known)
    elif found := re.match(r"No such command '([^']*)'", message):
        known = [] if context is None else list(context.command.commands)
        message = f"unknown command '{found[1]}'" + _nearest(found[1], known)
    elif found := re.match(r"Invalid value for '(\S+)'.*greater than or equal to (\S+)$", message):
        message = f"{found[1]} must be at least {found[2]}"
    elif found := re.search(r"'([^']*)' is not one of (.*)$", message):
        message = message.replace("Value error, ", "")
        message += _nearest(found[1], re.findall(r"'([^']*)'", found[2]))
    message = message[:1].lower() + message[1:]
    where = context.command_path if context is not None else "convergeflow"
    return f"{message} (see {where} --help)"


def _flags(command: Any) -> list[str]:
    """The long options of a command."""
    return [name for parameter in command.params for name in parameter.opts if name.startswith("--")]


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
