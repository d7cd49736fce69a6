"""The page on PyPI: the README with whole addresses, for PyPI knows no other file of the repository.

Everything else is in pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCE = PROJECT["urls"]["Source"]
FILES = SOURCE.replace("//github.com/", "//raw.githubusercontent.com/") + "/main"


def absolute(text: str) -> str:
    """Links and pictures that name a file of the repository get the address that it has on GitHub."""
    text = re.sub(r"(!\[[^\]]*\]\()(?![a-z]+:|#)", rf"\g<1>{FILES}/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?![a-z]+:|#)", rf"\g<1>{SOURCE}/blob/main/", text)


if __name__ == "__main__":
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(long_description=absolute(readme), long_description_content_type="text/markdown")
