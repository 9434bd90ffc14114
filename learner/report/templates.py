"""The parts that the report, the comparison and the dashboard share: templates and the inline script.

    uplot/, charts.js, completions.js ─▶ SCRIPT ─▶ *.html.jinja ─▶ one page without external files

Invariant: a page runs this script and no other. Its policy names the script's hash or a nonce.
"""

import base64
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from learner.report.charts import Chart

FOLDER = Path(__file__).parent
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
)


@functools.cache
def script(*more: str) -> str:
    """Return uPlot with its license, the scripts of all pages, and more files of this folder."""
    license_text = (FOLDER / "uplot/LICENSE").read_text("utf-8")
    names = ("uplot/uPlot.iife.min.js", "charts.js", "completions.js", *more)
    parts = [f"/*! uPlot\n{license_text}\n*/", *((FOLDER / name).read_text("utf-8") for name in names)]
    return "\n".join(parts)


def render_page(template_name: str, charts: Sequence[Chart], **values: Any) -> str:
    """Render a page that needs no other file and runs no script but ours."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return template(template_name).render(charts=charts, policy=POLICY.format(digest=digest), **values)


def template(name: str) -> jinja2.Template:
    """Load a template that escapes all values."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"script": lambda *more: Markup(script(*more)), "json_of": json_of}
    return environment.get_template(name)


def json_of(value: Any) -> Markup:
    """Encode a value for a script element: no text in it can end the element."""
    # ASCII, so half a surrogate pair is valid too. JSON.parse refuses NaN and Infinity.
    text = json.dumps(msgspec.to_builtins(value), separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))
