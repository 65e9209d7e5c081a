"""HTML from Jinja's templates, which lie next to the modules that fill them.

Every text that a template gets is escaped and loses its control characters; HTML (`Markup`) stays as it is.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.common.errors import printable

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

PACKAGE = Path(__file__).parents[1]


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # most commands need no HTML

    return Environment(
        loader=FileSystemLoader(PACKAGE),
        autoescape=True,
        finalize=_clean,
        undefined=StrictUndefined,  # a value that is missing is an error, not an empty text
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _clean(value: Any) -> Any:
    from markupsafe import Markup

    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def fill(template: str, **values: Any) -> "Markup":
    """HTML of a template, by its path in the package (`common/table.html`), with these values."""
    from markupsafe import Markup

    return Markup(_environment().get_template(template).render(values))
