"""Configures Sphinx, which builds these pages: sphinx-build -W docs build/docs."""

import inspect
from typing import Literal, get_origin

from sphinx.domains.python import PyObject
from sphinx.util.inspect import TypeAliasForwardRef

import jax_ep
import jax_ep.flax
from jax_ep._core import literals

project = "jax_ep"
author = "the jax_ep authors"
copyright = author  # noqa: A001  (Sphinx's name)
release = version = jax_ep.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"jax_ep {version}"
exclude_patterns = ["*.py"]
templates_path = ["_templates"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
nitpicky = False
# Names in single backticks are code, as in Markdown.
default_role = "code"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
# Otherwise a class, whose arguments are in another docstring, lists them twice.
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
# The arguments of a class are in the docstring of __init__, if it has one.
autoclass_content = "both"
# Longer signatures have one argument per line, with its default.
maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
myst_heading_anchors = 3
# Where the docs of other projects describe what annotations name. The inventories are
# local, so a build needs no network.
intersphinx_mapping = {
    "jax": ("https://docs.jax.dev/en/latest", "inventories/jax.txt"),
    "flax": ("https://flax.readthedocs.io/en/latest", "inventories/flax.txt"),
    "python": ("https://docs.python.org/3", "inventories/python.txt"),
}
# Annotations show types by these names, without what they stand for or private modules.
autodoc_type_aliases = {
    "PartitionSpec": "jax.sharding.PartitionSpec",
    "P": "jax.sharding.PartitionSpec",
    "Mesh": "jax.sharding.Mesh",
    "ArrayLike": "jax.typing.ArrayLike",
    "DTypeLike": "jax.typing.DTypeLike",
    "QuantizedWeights": "jax_ep.experts.QuantizedWeights",
    "routers.RouterFunction": "RouterFunction",
    "_experts.Activation": "Activation",
    **{name: name for name in ("Activation", "ExpertsFunction", "RouterFunction")},
    **{name: name for name, of in vars(literals).items() if get_origin(of) is Literal},
    **{name: f"jax_ep.{name}" for name in jax_ep.__all__ if name[0].isupper()},
}
# The metaclass of Flax's modules hides the arguments.
_of_init = inspect.signature(jax_ep.flax.MoE.__init__)
jax_ep.flax.MoE.__signature__ = _of_init.replace(
    parameters=[*_of_init.parameters.values()][1:], return_annotation=_of_init.empty
)
# Sphinx prints aliases in unions by their `repr`.
TypeAliasForwardRef.__repr__ = lambda self: self.name
for field in PyObject.doc_field_types:
    if field.name == "variable":
        field.label = "Attributes"


def name_dtypes(_app, _what, _name, _obj, _options, lines) -> None:
    """Renames the types of arguments and attributes whose fields convert dtypes."""
    for at, line in enumerate(lines):
        if line.startswith(":vartype"):
            line = line.replace("DtypeNameOrNone", "Dtype | None")
            lines[at] = line.replace("DtypeName", "Dtype")


def setup(app) -> None:
    """Runs `name_dtypes` after napoleon, which writes these lines."""
    app.connect("autodoc-process-docstring", name_dtypes, priority=600)
