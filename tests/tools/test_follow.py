"""A page is followed word by word, and a page that lies is found out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

PAGE = """# Title

```bash runnable
mkdir inner
cd inner
greeting=hello
```

```text
for reading only
```

```python file=said.py
print("from a file")
```

```bash runnable
echo "$greeting from $(basename "$PWD")"
python ../said.py
```

```text output
hello from
inner ... a file
```

```python runnable
number = 20
```

```python runnable
print(number + 1)
```

```text output
21
```
"""


def followed(follow: Any, place: Path, text: str, steps: str = "") -> int:
    page = place / "page.md"
    page.write_text(text)
    ran: int = follow.Reader(place, dict(os.environ), steps).follow(page, "page.md")
    return ran


def test_a_page_is_followed_with_its_folder_its_variables_and_its_names(follow: Any, tmp_path: Path) -> None:
    assert followed(follow, tmp_path, PAGE) == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("21\n", "22\n"), "page.md:35: the page says:\n22"),
        (("mkdir inner", "mkdir inner/deep"), "page.md:3:"),
        (("number = 20", "nombre = 20"), "NameError"),
        (("echo", "false; echo"), "page.md:17:"),
        (("inner ...", "outer ..."), "the page says"),
        (("mkdir inner\ncd", "mkdir inner && cd"), "write two lines"),
    ],
)
def test_a_page_that_lies_is_found_out(follow: Any, tmp_path: Path, change: tuple[str, str], said: str) -> None:
    with pytest.raises(follow.Failure) as failure:
        followed(follow, tmp_path, PAGE.replace(*change, 1))
    assert said in str(failure.value)


def test_minutes_become_steps_only_if_asked(follow: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = "```bash runnable\necho train --minutes 10 --out x\n```\n\n```text output\ntrain {} --out x\n```\n"
    followed(follow, tmp_path, page.format("--steps 20"), steps="20")
    assert "--steps 20" in capsys.readouterr().out
    followed(follow, tmp_path, page.format("--minutes 10"))


def test_all_pages_that_teach_are_followed(follow: Any) -> None:
    assert {"README.md", "docs/index.md", "docs/tutorials/watching.md"} <= set(follow.PAGES)
    for name in follow.PAGES:
        found = list(follow.blocks(follow.ROOT / name, name))
        assert any("runnable" in block.marks for block in found), f"{name} has nothing to follow"


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a b", "a\nb\n", True),
        ("a ... c", "a b b c", True),
        ("a ... c", "a b", False),
        ("...", "", True),
        ("a.b", "axb", False),
        ("a b", "a b c", False),
    ],
)
def test_output_is_compared_word_by_word(follow: Any, expected: str, printed: str, same: bool) -> None:
    assert follow.matches(expected, printed) is same
