"""docs/reliability.md: the commands that test its promises name what exists."""

from __future__ import annotations

import re

import pytest

from support import ROOT

TABLE = (ROOT / "docs" / "reliability.md").read_text().partition("| promise |")[2]
COMMANDS = [
    command
    for line in TABLE.partition("\n\n")[0].splitlines()[2:]
    for command in re.findall(r"`([^`]*)`", line.rpartition(" | ")[2])
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_name_what_exists(command: str) -> None:
    program, *words = command.split()
    files = [word for word in (program, *words) if "/" in word]
    if words[:1] == ["-m"]:
        files.append(words[1].replace(".", "/") + ".py")
    assert files or program == "ctest"
    for file in files:
        assert (ROOT / file).exists(), file
    if program == "ctest":
        cmake = "".join(
            (ROOT / "tests" / folder / "CMakeLists.txt").read_text()
            for folder in ("cc", "emulator")
        )
        assert re.search(rf"\((\w*{words[-1]}\w*)", cmake)
    if program == ".ci/run":
        text = (ROOT / ".ci" / "run").read_text()
        assert all(f"step_{step}()" in text for step in words)
