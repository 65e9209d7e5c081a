"""Settings of the documentation site: Sphinx with MyST Markdown and the Furo theme. Build it with `make docs`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from docstrings import to_rest  # noqa: E402
from generate import write_pages  # noqa: E402
from typeset import visit_math  # noqa: E402

project = "fedsim"
author = "The fedsim authors"
copyright = "The fedsim authors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
html_theme = "furo"
html_title = "fedsim"
html_show_sphinx = False
html_static_path = ["site", "scripts"]  # the second one is generated: DataTables, from the package that ships it
html_css_files = ["site.css"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
html_math_renderer = "mathml"
copybutton_prompt_text = "$ "
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True


def as_written(app, what, name, obj, options, lines) -> None:
    """Docstrings here are plain text with formulas, not reStructuredText."""
    lines[:] = to_rest(lines)


def included(app, relative_path, parent, content) -> None:
    """Pages that are included from the package link to files next to them, which have other names here."""
    pages = {"DEPLOY": "deployment", "SECURITY": "security", "SECURITY-DETAILS": "security-details"}
    for there, here in [*((f"({old}.md", f"({new}.md") for old, new in pages.items()), ("(../../docs/", "(")]:
        content[0] = content[0].replace(there, here)


def setup(app) -> None:
    """Write the generated pages before Sphinx looks for sources, and turn docstrings into paragraphs."""
    write_pages(HERE)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.connect("autodoc-process-docstring", as_written)
    app.connect("include-read", included)
