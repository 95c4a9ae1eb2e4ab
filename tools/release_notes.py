"""Prints the notes of the first release in CHANGELOG.md.

    python -m tools.release_notes [TAG]

A tag must be "v" and the version of jax_ep/__init__.py. The changelog's first section
must then be of this version, and not "(unreleased)".
"""

from __future__ import annotations

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def version() -> str:
    """Returns the version in jax_ep/__init__.py."""
    text = (ROOT / "jax_ep" / "__init__.py").read_text()
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return found


def newest(changelog: str) -> tuple[str, str]:
    """Returns the heading and the text of a changelog's first section."""
    _, heading, text = re.split(r"^## (.+)\n", changelog, maxsplit=1, flags=re.M)
    return heading.strip(), re.split(r"^## ", text, flags=re.M)[0].strip()


def absolute(text: str, tag: str, home: str) -> str:
    """Returns the text with links that work outside the repository."""
    return re.sub(r"\]\((?!https?:)([^)]+)\)", rf"]({home}/blob/{tag}/\1)", text)


def main() -> None:
    """Prints the notes, or exits and says what is wrong."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    heading, text = newest((ROOT / "CHANGELOG.md").read_text())
    tag = sys.argv[1] if len(sys.argv) > 1 else ""
    if tag and tag != f"v{version()}":
        sys.exit(f"the tag must be v{version()} as jax_ep.__version__ is, got {tag}")
    if tag and heading.split()[0] != version():
        sys.exit(f"CHANGELOG.md must begin with {version()}, got {heading}")
    if tag and "unreleased" in heading:
        sys.exit(f"CHANGELOG.md must say when {version()} was released, got {heading}")
    print(absolute(text, tag or "main", project["urls"]["Homepage"]))


if __name__ == "__main__":
    main()
