"""The pages of the repository, and the Python in them."""

from __future__ import annotations

import re

from support import ROOT


def python_blocks(name, word=""):
    """The Python blocks of a page that contain `word`, in order."""
    text = (ROOT / name).read_text()
    found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [block for block in found if word in block]
