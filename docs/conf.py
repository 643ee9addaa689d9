"""Sphinx settings: `make docs` builds the pages into docs/_build/html, and takes every warning for an error."""

from importlib.metadata import version as installed_version

project = "vla_async"
author = "the vla_async developers"
project_copyright = f"2026, {author}"
version = release = installed_version("vla_async")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"vla_async {version}"
html_show_sphinx = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
