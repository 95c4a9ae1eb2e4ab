"""A release's page on a package index, and its notes."""

from __future__ import annotations

import re
import sys
import tomllib

import pytest

import jax_ep
from support import ROOT
from support.launch import run_to_end
from tools import release_notes

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOME = PROJECT["project"]["urls"]["Homepage"]


def test_readme_on_an_index_has_no_relative_links() -> None:
    """The build replaces relative links; each leads to a file of the repository."""
    settings = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = (ROOT / "README.md").read_text()
    assert "](docs/" in text
    for each in settings["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 20
    for target in targets:
        path = re.sub(r"^https://raw.githubusercontent.com/.*?/main/", "", target)
        path = path.removeprefix(f"{HOME}/blob/main/").partition("#")[0]
        if path.startswith("https://") or target.startswith("#"):
            assert target.startswith(("#", "https://"))
        else:
            assert path != target, f"relative: {target}"
            assert (ROOT / path).exists(), target
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert all(url.startswith("https://raw.") for url in pictures)


def test_repository_has_one_address() -> None:
    names = ("pyproject.toml", "CITATION.cff", "plugins/cuda13/pyproject.toml")
    for name in names:
        found = re.findall(
            r"https://github\.com/[^\s/]+/[\w-]+", (ROOT / name).read_text()
        )
        assert set(found) == {HOME}, name


def test_notes() -> None:
    changelog = (
        "# Changelog\n\nHow.\n\n## 0.2.0 (2030-01-02)\n\nNew.\n\n### Bugs\n\n* a\n"
    )
    older = "\n## 0.1.0\n\nOld.\n"
    heading, text = release_notes.newest(changelog + older)
    assert heading == "0.2.0 (2030-01-02)"
    assert text == "New.\n\n### Bugs\n\n* a"
    assert release_notes.newest(changelog) == (heading, text)
    linked = release_notes.absolute("[a](docs/a.md#b), [c](https://c)", "v1", HOME)
    assert linked == f"[a]({HOME}/blob/v1/docs/a.md#b), [c](https://c)"
    assert release_notes.version() == jax_ep.__version__


@pytest.mark.parametrize("tag", ["", "v9.9.9", f"v{jax_ep.__version__}"])
def test_notes_of_a_tag(tag: str) -> None:
    """A tag must equal the version, and the changelog must have its date."""
    done = run_to_end(
        [sys.executable, "-m", "tools.release_notes", *filter(None, [tag])], cwd=ROOT
    )
    heading = release_notes.newest((ROOT / "CHANGELOG.md").read_text())[0]
    right = not tag or (tag == f"v{heading.split()[0]}" and "unrel" not in heading)
    assert (done.returncode == 0) == right, done.stderr
    if right:
        assert "### New features" in done.stdout
        assert not re.search(r"\]\((?!https:)", done.stdout)
    else:
        assert tag in done.stderr or "released" in done.stderr
