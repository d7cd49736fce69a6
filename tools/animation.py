"""docs/images/flow.svg: a text of the shipped model on its way from noise to words, step by step.

Every frame is a real one, of `model.generate(observe=...)`: the word at a position is the one with the largest weight,
and the smaller that weight, the fainter the word. The strip below the text keeps all steps. To draw it again:

    python tools/animation.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import convergeflow as cf

OUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "flow.svg"
SEED, PRESET, NFE, GRID = 104, "config-b", 192, "closing"
SECONDS, HOLD = 0.32, 4.0
WIDTH, MARGIN, LINE, CHARACTER, SIZE = 600, 16, 28, 9.03, 15
COLUMNS = int((WIDTH - 2 * MARGIN) / CHARACTER)
LEVELS = 8
"""Shades of a word, from unreadable to certain."""

STYLE = """
:root{--paper:#fff;--ink:#16324f}
svg{background:var(--paper);color:var(--ink)}
rect{shape-rendering:crispEdges}
text{font:%(size)dpx ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:currentColor}
.s{font-family:system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;font-size:13px;opacity:.75}
.f{visibility:hidden;animation:f %(whole).2fs step-end infinite}
.last{animation-name:last}
.c{fill:var(--paper);animation:c %(whole).2fs step-end infinite}
@keyframes f{0%%{visibility:visible}%(share).3f%%{visibility:hidden}}
@keyframes last{0%%{visibility:visible}%(held).3f%%{visibility:hidden}}
@keyframes c{%(cover)s}
@media (prefers-color-scheme:dark){:root{--paper:#0d1117;--ink:#cfe3f7}}
@media (prefers-reduced-motion:reduce){.f{animation:none}.c{display:none}.last{visibility:visible}}
"""


def record() -> dict[str, Any]:
    """One sample with its frames, as the replays have it."""
    from convergeflow.results.frames import Frames, recording

    model = cf.load("stories-small")
    frames = Frames()
    settings = replace(cf.preset(PRESET, model, nfe=NFE), grid=GRID)
    samples = model.generate(num=1, seed=SEED, settings=settings, observe=frames)
    made: dict[str, Any] = recording(frames.frames, samples, model.tokenizer)
    return made


def places(words: list[str]) -> list[tuple[int, int]]:
    """(line, column) of every word of the finished text; each keeps its place from the first frame on."""
    found, line, column = [], 0, 0
    for word in words:
        if word == "\u23ce":  # a new text begins on a new line
            found.append((line, column))
            line, column = line + 1, 0
            continue
        space = 0 if word in ".,!?" or column == 0 else 1
        if column + space + len(word) > COLUMNS:
            line, column, space = line + 1, 0, 0
        found.append((line, column + space))
        column += space + len(word)
    return found


def level(weight: float) -> int:
    return min(LEVELS - 1, int(weight * LEVELS))


def draw(made: dict[str, Any]) -> str:
    """The SVG, with one group per frame that is visible in its time."""
    sample, words = made["samples"][0], made["words"]
    frames = sample["frames"]
    final = [words[str(token)] for token in sample["tokens"]]
    where = places(final)
    lines = 1 + max(line for line, _ in where)
    strip = 84 + lines * LINE
    rows, wide = 5, (WIDTH - 2 * MARGIN) / len(final)
    height = strip + rows * len(frames) + 42
    whole = SECONDS * (len(frames) - 1) + HOLD
    percent = 100 * SECONDS / whole
    # The strip is drawn whole, under a cover that moves down a row a step.
    cover = "".join(f"{n * percent:.2f}%{{transform:translateY({(n + 1) * rows}px)}}" for n in range(len(frames)))
    style = STYLE % {"size": SIZE, "whole": whole, "share": percent, "held": 100 * HOLD / whole, "cover": cover}
    shades = "".join(f".w{n}{{opacity:{0.12 + 0.88 * n / (LEVELS - 1):.2f}}}" for n in range(LEVELS))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>A text of stories-small on its way from noise to words: {escape(sample['text'])}</title>",
        f"<style>{style}{shades}</style>",
        f'<text class="s" x="{MARGIN}" y="{strip - 12}">Rows are steps, columns are positions: '
        "the stronger the colour, the surer the word.</text>",
    ]
    for number, frame in enumerate(frames):
        last = number == len(frames) - 1
        delay = f'style="animation-delay:{number * SECONDS:.2f}s"'
        parts.append(f'<g class="f{" last" if last else ""}" {delay}>')
        calls = f"step {frame['step'] + 1} of {frame['steps']}, {frame['calls']} network calls"
        parts.append(f'<text class="s" x="{MARGIN}" y="{28}">{calls}</text>')
        for position, token in enumerate(frame["tokens"]):
            line, column = where[position]
            word, slot = words[str(token)], final[position]
            fit = (
                f' textLength="{len(slot) * CHARACTER:.0f}" lengthAdjust="spacingAndGlyphs"'
                if len(word) > len(slot)
                else ""
            )
            shade = level(frame["top_weights"][position][0])
            x, y = MARGIN + column * CHARACTER, 62 + line * LINE
            parts.append(f'<text x="{x:.0f}" y="{y}" class="w{shade}"{fit}>{escape(word)}</text>')
        parts.append("</g>")
    size = f'width="{WIDTH - 2 * MARGIN}" height="{rows * len(frames) + 2}"'
    parts.append(f'<svg x="{MARGIN}" y="{strip}" {size} fill="currentColor">')
    for number, frame in enumerate(frames):
        for position, leaders in enumerate(frame["top_weights"]):
            corner = f'x="{position * wide:.1f}" y="{number * rows}" width="{wide:.1f}" height="{rows}"'
            parts.append(f'<rect {corner} class="w{level(leaders[0])}"/>')
    parts.append(f'<rect class="c" x="-1" width="{WIDTH}" height="{rows * len(frames) + 2}"/></svg>')
    parts.append(
        f'<text class="s" x="{MARGIN}" y="{height - 14}">stories-small, {len(final)} positions, seed {sample["seed"]}, '
        f"preset {PRESET}: {sample['calls']} calls in all</text></svg>"
    )
    return "\n".join(parts) + "\n"


def main() -> None:
    OUT.write_text(draw(record()), encoding="utf-8")
    print(f"{OUT}: {OUT.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
