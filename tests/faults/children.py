"""Commands as forked children of a process that has imported everything and computed nothing, and what they leave.

Starting Python and torch takes longer than most trials; a fork starts at once. A kill is a real one all the same: the
child has descriptors, locks and memory of its own, and SIGKILL tidies nothing up.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import io
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

for threads in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(threads, "1")
os.environ.update(OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).parent))

from shim import Shim  # noqa: E402

from convergeflow.cli.main import main  # noqa: E402
from convergeflow.files import DRAFT, LOCK  # noqa: E402

CLOCKS = {"created", "seconds", "tokens_per_second", "training_seconds", "command", "versions", "points_seconds"}
"""What may differ between two runs of one command: the time of day, and how long things took."""
SECONDS = 120.0
"""Longer than this is a hang."""
_reports = [2]
"""Where a child says what it has to say when it cannot end in order."""
OUTSIDE = 98
"""The exit code of a child that wanted to change a file where it must not."""
MODULES = (
    *("cli.generate", "cli.train", "cli.prepare", "cli.evaluate", "cli.compare", "cli.inspect", "cli.import_"),
    *("cli.serve", "cli.blind", "cli.sweep", "serving.api", "serving.models", "serving.limits", "interop.peers"),
    *("training.run", "data.prepare", "results.draw", "results.record", "results.figures", "results.trace"),
    *("studies.study", "studies.table", "studies.systems", "evaluation.assess", "evaluation.reference"),
    *("interop.langflow", "systems.convergeflow", "systems.autoregressive", "systems.langflow", "zoo", "data.hub"),
)


def import_everything() -> None:
    """Whatever a child would import; nothing is computed but the law of the stories."""
    for name in MODULES:
        importlib.import_module(f"convergeflow.{name}")
    # What is imported where it is first used: the optimizer, the readers, the server.
    for name in ("torch._dynamo", "pyarrow.parquet", "huggingface_hub", "uvicorn.protocols.http.auto", "tensorstore"):
        importlib.import_module(name)
    from convergeflow.data.stories import stories_law
    from convergeflow.data.tokenizer import stories_tokenizer

    stories_law()
    stories_tokenizer()
    metadata.entry_points = functools.cache(metadata.entry_points)  # reads the lists of all installed packages
    gc.collect()
    gc.freeze()  # or every collection in a child walks through, and so copies, all that was imported here


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    code: int
    """Exit code; negative for a signal."""
    said: str
    points: dict[str, int] = field(default_factory=dict)

    @property
    def last(self) -> str:
        return (self.said.strip().splitlines() or [""])[-1][:300]

    @property
    def one_line(self) -> bool:
        """Whether nothing broke that nobody had foreseen."""
        return "internal error" not in self.said and "Traceback" not in self.said


def child(
    words: Sequence[object],
    log: Path,
    shim: Shim | None = None,
    environment: dict[str, str] | None = None,
    first: Callable[[], None] = lambda: None,
) -> int:
    """Start a command in a forked child, which calls `first` before it; its process id."""
    number = os.fork()
    if number:
        return number
    code = 70
    try:
        os.setpgid(0, 0)
        os.environ.update(environment or {})
        said = io.StringIO()
        _reports.append(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        if shim is not None:
            shim.install()
        with redirect_stdout(said), redirect_stderr(said):
            first()
            code = main([str(word) for word in words])
        counted = json.dumps(shim.kinds if shim else {})
        os.write(_reports[-1], f"{counted}\n{said.getvalue()}".encode(errors="backslashreplace"))
    finally:
        os._exit(code)


def wait(number: int, log: Path, seconds: float = SECONDS) -> Ended:
    """Wait for a child, and end it when it takes too long."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(number, os.WNOHANG)
        if found:
            break
        if time.monotonic() > deadline:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
            log.unlink(missing_ok=True)
            return Ended(-99, f"no end within {seconds:.0f} s")
        time.sleep(0.005)
    counted, _, said = log.read_text(errors="replace").partition("\n") if log.is_file() else ("", "", "")
    log.unlink(missing_ok=True)
    return Ended(os.waitstatus_to_exitcode(status), said, json.loads(counted or "{}"))


def run(words: Sequence[object], root: Path, shim: Shim | None = None, **environment: str) -> Ended:
    log = root.with_suffix(".log")
    return wait(child(words, log, shim, environment), log)


# --- what a child may do ---


def at_most(gigabytes: int) -> None:
    """Give this process so much memory beyond what it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (gigabytes << 30),) * 2)


_CHANGES = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.utime"), 1),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), 2),
}
"""What Python announces before it changes a file system, and how many of its arguments are paths."""


def fence(*allowed: Path) -> None:
    """End this process when it is about to change a file outside of these folders; devices and pipes are no files."""
    sys.dont_write_bytecode = True
    inside = tuple(os.path.realpath(folder) + os.sep for folder in allowed)

    def check(place: Any) -> None:
        if place is None or isinstance(place, int):
            return
        found = os.path.realpath(os.fsdecode(place))
        if not f"{found}{os.sep}".startswith(inside or ("\0",)) and not found.startswith(("/dev/", "/proc/")):
            os.write(_reports[-1], f"{{}}\noutside: {found}\n".encode())
            os._exit(OUTSIDE)

    def watch(event: str, arguments: Any) -> None:
        if event == "open" and isinstance(arguments[2], int):
            if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
                check(arguments[0])
        elif event in _CHANGES:
            for place in arguments[: _CHANGES[event]]:
                check(place)

    sys.addaudithook(watch)


# --- what is on the disk ---


def picture(root: Path) -> dict[str, str]:
    """Every file that counts, by the hash of what must not differ."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_dir() or path.name == "timing.jsonl" or path.name.endswith(LOCK):
            continue
        if any(part.startswith(DRAFT) for part in path.relative_to(root).parts):
            continue
        # Records name the folder of their model.
        content = _content(path).replace(str(root).encode(), b"ROOT")
        found[name] = hashlib.sha256(content).hexdigest()
    return found


def _content(path: Path) -> bytes:
    if path.suffix in (".png", ".svg", ".html", ".md", ".csv"):
        return b"drawn"
    content = path.read_bytes()
    if path.suffix == ".json" and path.name not in ("manifest.json", "run.json", "config.json"):
        with suppress(ValueError):
            return json.dumps(_timeless(json.loads(content)), sort_keys=True).encode()
    return content


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(inner) for key, inner in value.items() if key not in CLOCKS}
    return [_timeless(inner) for inner in value] if isinstance(value, list) else value
