"""The command line: which commands exist, and what a mistake looks like.

Every failure is one line on stderr. Exit codes: 0 done, 1 failed, 2 the user's mistake (the line names the fix),
130 stopped with Ctrl-C. `--debug`, anywhere on the line, shows the traceback of a failure. Nothing heavy is imported
here: `convergeflow --help` must answer at once.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from convergeflow import __version__
from convergeflow.errors import ConvergeFlowError, UserError

COMMANDS = {
    "fetch": "fetch",
    "prepare": "prepare",
    "train": "train",
    "generate": "generate",
    "evaluate": "evaluate",
    "sweep": "sweep",
    "compare": "compare",
    "blind": "blind",
    "reproduce": "reproduce",
    "inspect": "inspect",
    "bench": "bench",
    "import": "import_",
    "list": "list",
}
"""Command word -> file in this folder, in the order of the help page."""


class _InOrder(TyperGroup):
    """Lists the commands as they stand in COMMANDS; typer would put those with parts first."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=list(COMMANDS).index)


def build() -> typer.Typer:
    """The application with every command whose file is there.

    A command file holds one function named like the file (or with an underscore behind, where the plain name is a
    Python word), or a `typer.Typer` called `app` when the command has parts.
    """
    app = typer.Typer(
        name="convergeflow",
        cls=_InOrder,
        add_completion=False,
        rich_markup_mode=None,  # plain text: the same help on a screen, in a pipe and in the documentation
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    for word, module_name in COMMANDS.items():
        path = f"convergeflow.cli.{module_name}"
        if importlib.util.find_spec(path) is None:
            continue
        module = importlib.import_module(path)
        parts = getattr(module, "app", None)
        if isinstance(parts, typer.Typer):
            app.add_typer(parts, name=word, help=_help(module))
        else:
            function = getattr(module, f"{word}_", None) or getattr(module, word)
            app.command(word, help=_help(function))(function)
    return app


def _help(documented: object) -> str:
    """The docstring as help; what follows "Example" keeps its line breaks."""
    text = inspect.getdoc(documented) or ""
    return re.sub(r"\n\n(?=Examples?\b)", "\n\n\b\n", text)


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # People add --debug to the end of the line that failed, so it is understood everywhere.
    options = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in options
    words = [word for word in options if word != "--debug"] + words[len(options) :]
    # Loading problems are reported by our own one line; transformers would print a table first.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        code = typer.main.get_command(build()).main(words, prog_name="convergeflow", standalone_mode=False)
        if code == 130:  # how typer reports Ctrl-C
            return _fail("stopped", 130)
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except typer.Abort:
        return _fail("stopped", 130)
    except typer.TyperException as mistake:
        return _fail(_describe(mistake), mistake.exit_code)
    except (ConvergeFlowError, OSError) as failure:
        if debug:
            traceback.print_exc()
        return _fail(_describe_failure(failure), 2 if isinstance(failure, UserError) else 1)
    except Exception as failure:
        if debug:
            traceback.print_exc()
            return _fail(f"internal error: {_one_line(repr(failure))}", 1)
        return _fail(f"internal error: {_one_line(repr(failure))} (run with --debug for the traceback)", 1)


def _fail(message: str, code: int) -> int:
    sys.stdout.flush()
    print(f"error: {message}" if code != 130 else message, file=sys.stderr, flush=True)
    return code


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _describe_failure(failure: BaseException) -> str:
    if isinstance(failure, OSError) and failure.strerror and failure.filename is not None:
        return f"{failure.strerror.lower()}: {failure.filename}"
    return _one_line(str(failure)) or type(failure).__name__


def _describe(mistake: typer.TyperException) -> str:
    """A usage error as one line: what is wrong, the nearest right word, where to read on."""
    context = getattr(mistake, "ctx", None)
    message = _one_line(mistake.format_message()).rstrip(".")
    option = getattr(mistake, "option_name", None)
    if option is not None and message.startswith("No such option"):
        known = _options(context)
        message = f"unknown option {option}" + _nearest(option, known)
    elif found := re.match(r"No such command '([^']*)'", message):
        known = list(context.command.commands) if context is not None else []
        message = f"unknown command '{found[1]}'" + _nearest(found[1], known)
    elif found := re.search(r"'([^']*)' is not one of (.*)$", message):
        message = message.replace("Value error, ", "")
        message += _nearest(found[1], re.findall(r"'([^']*)'", found[2]))
    message = message[:1].lower() + message[1:]
    where = context.command_path if context is not None else "convergeflow"
    return f"{message} (see {where} --help)"


def _options(context: typer.Context | None) -> list[str]:
    if context is None:
        return []
    return [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
