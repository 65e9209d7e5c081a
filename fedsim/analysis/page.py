"""The HTML page around a report. It contains its styles, scripts and data, and loads nothing.

The charts are Plotly's and the tables DataTables', because hover, isolation, sorting and filters are then theirs, and
both scripts ship inside pure Python packages. They are packed by gzip: 1.9 MB in place of 5.5.
"""

import base64
import gzip
import json
import re
from collections.abc import Mapping
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedsim.common.errors import printable
from fedsim.common.templates import fill

HERE = Path(__file__).parent
# The browser refuses to load anything that is not in the file.
POLICY = "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(title: str, content: Markup, data: Mapping[str, Any], live: bool = False) -> str:
    """The whole document. data: what report.js draws. live: it may ask the server that it comes from."""
    texts = {**libraries(), "data": json.dumps(_printable(data), ensure_ascii=False, allow_nan=False)}
    return fill(
        "analysis/page.html",
        title=title,
        content=content,
        policy=Markup(f"{POLICY}; connect-src 'self'" if live else POLICY),
        css=Markup((HERE / "report.css").read_text(encoding="utf-8")),
        js=Markup((HERE / "report.js").read_text(encoding="utf-8")),
        packs={name: packed(text) for name, text in texts.items()},
    )


def packed(text: str) -> str:
    """A text that `unpack` of report.js reads again."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def libraries() -> dict[str, str]:
    """The scripts and the styles of Plotly and DataTables, from the packages that ship them."""
    plotly, tables = distribution("plotly"), distribution("itables")
    module = _text(tables, "itables/html/dt_bundle.js")
    exported = re.search(r"export\s*\{.*?\b(\w+) as default\b.*?\};?", module)
    assert exported is not None
    # As a module it could not be unpacked at run time without a request, which the page's policy refuses.
    script = module.replace(exported[0], f"window.DataTable = {exported[1]};")
    return {
        "plotly": _text(plotly, "plotly/package_data/plotly.min.js"),
        "datatables": f"(() => {{{script}}})();",
        "datatables-css": _text(tables, "itables/html/dt_bundle.css"),
    }


def _text(package: Distribution, file: str) -> str:
    return Path(str(package.locate_file(file))).read_text(encoding="utf-8")


def _printable(value: Any) -> Any:
    """A value for JSON with printable texts. JSON writes control characters as escapes, which the page would undo."""
    if isinstance(value, Mapping):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value
