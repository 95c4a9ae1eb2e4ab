"""The pages of the repository, and the Python in them."""

from __future__ import annotations

import re

from support import ROOT


def python_blocks(name, word=""):
    """Those of a page that have `word`, in its order."""
    text = (ROOT / name).read_text()
    found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [block for block in found if word in block]
