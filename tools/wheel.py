"""Build the sdist and the wheel, install the wheel into an environment of its own, and use it from an empty folder.

The environment build/fresh/venv has the wheel itself and finds the dependencies in .venv, so that two gigabytes are not
installed twice. Nothing of the source tree is on its path: what the wheel lacks is missing there. `make tutorials` uses
the same environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
FRESH = ROOT / "build" / "fresh" / "venv"
BINARIES = FRESH / ("Scripts" if os.name == "nt" else "bin")


def build() -> Path:
    """dist/ with an sdist and the wheel that is made of it, so that the sdist is known to be complete."""
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)], check=True, stdout=subprocess.DEVNULL
    )
    (wheel,) = DIST.glob("*.whl")
    return wheel


def compare(wheel: Path) -> int:
    """The wheel has every file of the package and no other; returns how many."""
    package = ROOT / "src" / "convergeflow"
    here = {
        f"convergeflow/{path.relative_to(package).as_posix()}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        there = {name for name in archive.namelist() if name.startswith("convergeflow/")}
    if here != there:
        sys.exit(f"error: the wheel lacks {sorted(here - there)[:8]} and has besides {sorted(there - here)[:8]}")
    return len(there)


def install(wheel: Path) -> None:
    """A new environment with the wheel, and the dependencies of the present one on its path."""
    shutil.rmtree(FRESH, ignore_errors=True)
    venv.create(FRESH, with_pip=True, symlinks=os.name != "nt")
    python = BINARIES / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", str(wheel)], check=True
    )
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    # Such a path is only put on the path. The .pth files that lie there, as that of an editable install, are not read.
    theirs = [path for path in sys.path if Path(path).name == "site-packages"]
    Path(own, "dependencies.pth").write_text("\n".join(theirs) + "\n", encoding="utf-8")


def use() -> None:
    """Commands and the Python interface, from an empty folder, with a cache of their own."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"CONVERGEFLOW_CACHE": str(Path(folder) / "cache"), "CONVERGEFLOW_QUIET": "1"}
        empty = Path(folder) / "empty"
        empty.mkdir()

        def run(*command: str) -> str:
            done = subprocess.run(
                [str(BINARIES / command[0]), *command[1:]], cwd=empty, env=environment, capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(f"error: {' '.join(command)} from an empty folder:\n{done.stdout}{done.stderr}")
            return done.stdout

        where = run(
            "python", "-c", "import convergeflow; print(convergeflow.__file__, convergeflow.__version__)"
        ).split()
        if FRESH.resolve() not in Path(where[0]).resolve().parents:
            sys.exit(f"error: {where[0]} was imported, not the wheel")
        models = run("convergeflow", "list", "models")
        text = run("convergeflow", "generate", "--num", "1", "--seed", "102", "--nfe", "16")
        run(
            "convergeflow",
            "prepare",
            "stories",
            "--length",
            "32",
            "--blocks",
            "64",
            "--heldout-blocks",
            "16",
            "--out",
            "corpus",
        )
        run("convergeflow", "evaluate", "stories-small", "--num", "4", "--nfe", "8", "--out", "record.json")
        record = json.loads((empty / "record.json").read_text(encoding="utf-8"))
        said = run(
            "python", "-c", "import convergeflow as cf; print(cf.load('stories-small').generate(num=1).texts[0])"
        )
        if "stories-small" not in models or not text.strip() or not said.strip() or record["n"] != 4:
            sys.exit(f"error: the installed package does not speak: {models} {text} {said} {record}")
        print(f"version {where[1]} from an empty folder: {text.strip()}")


def main() -> None:
    wheel = build()
    print(f"{wheel.name}: {compare(wheel)} files, {wheel.stat().st_size / 1e6:.1f} MB")
    install(wheel)
    use()


if __name__ == "__main__":
    main()
