"""The site: every page has its place, nothing comes from another host, and the animation shows a real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

APART = ("experiments/", "results/")
"""Pages of these folders are reached from the pages that list them; all others are in the navigation."""


def test_every_page_has_a_place_in_the_navigation(site: Any) -> None:
    listed = site.navigation()
    pages = {str(site.place(page)) for page in site.DOCS.rglob("*.md")}
    for name in listed:
        there = name in pages or name in site.GENERATED or name.startswith("source/")
        assert there or (site.ROOT / f"{Path(name).stem.upper()}.md").is_file(), f"zensical.toml names {name}"
    assert len(listed) == len(set(listed))
    missing = {name for name in pages - set(listed) if not name.startswith(APART)}
    assert not missing, f"put these pages into the navigation of zensical.toml: {sorted(missing)}"


def test_links_out_of_the_documentation_lead_to_copies(site: Any) -> None:
    places = {
        "docs/results/README.md": "results/index.md",
        "docs/results": "results/index.md",
        "docs/sampling.md": "sampling.md",
        "CHANGELOG.md": "changelog.md",
        "src/convergeflow/paper.py": "source/src/convergeflow/paper.py.md",
        "docs/results/basic-small/words.py": "results/basic-small/words.py",
    }
    for file, place in places.items():
        assert str(site.place(site.ROOT / file)) == place


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script src="https://cdn.example/x.js"></script>'),
        ("b.html", '<link rel="stylesheet" href="//fonts.example/x.css">'),
        ("c.html", '<p style="background: url(https://i.example/x.png)">'),
        ("d.html", "<style>@font-face { src: url('https://f.example/x.woff') }</style>"),
        ("e.css", "@import 'https://f.example/x.css';"),
        ("f.css", "a { background: url(https://i.example/x.png) }"),
        ("g.html", '<img srcset="https://i.example/x.png 2x">'),
    ],
)
def test_another_host_is_found(site: Any, tmp_path: Path, name: str, text: str) -> None:
    assert site.other_hosts(tmp_path) == []
    (tmp_path / name).write_text(text)
    assert len(site.other_hosts(tmp_path)) == 1


def test_a_link_to_follow_loads_nothing(site: Any, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="https://semver.org">x</a><img src="b.png"><style>a{b:url(c.png)}</style>'
    )
    assert site.other_hosts(tmp_path) == []


def test_a_dead_link_is_found(site: Any, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.html").write_text('<h1 id="top">x</h1><a href="../a.html"></a>')
    alive = '<a href="inner/b.html#top"></a><a href="https://semver.org"></a><a href="#"></a>'
    (tmp_path / "a.html").write_text(alive)
    assert site.dead_links(tmp_path) == []
    (tmp_path / "a.html").write_text(alive + '<a href="inner/b.html#bottom"></a><a href="c.html"></a>')
    assert site.dead_links(tmp_path) == ["a.html: inner/b.html#bottom", "a.html: c.html"]


def test_the_animation_shows_a_real_run(animation: Any) -> None:
    """Its last frame is what the model writes, and its first is not."""
    made = animation.record()
    drawn = animation.OUT.read_text(encoding="utf-8")
    assert animation.escape(made["samples"][0]["text"]) in drawn
    frames = made["samples"][0]["frames"]
    assert drawn.count('<g class="f') == len(frames) > 20
    assert frames[0]["tokens"] != frames[-1]["tokens"] == made["samples"][0]["tokens"]
    assert animation.OUT.stat().st_size < 400_000
