"""How Sphinx builds these pages: sphinx-build -W docs build/docs."""

import jax_ep

project = "jax_ep"
author = "the jax_ep authors"
copyright = author  # noqa: A001  (Sphinx's name)
release = version = jax_ep.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinxcontrib.mermaid",
]
html_theme = "furo"
html_title = f"jax_ep {version}"
exclude_patterns = ["*.py"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
nitpicky = False
# Names in single backticks are code, as in Markdown.
default_role = "code"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
