"""One HTML file: style, data, plotly and our script inside it, nothing fetched, and a policy that forbids fetching."""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path

from asfp.errors import AsfpError
from asfp.report.content import Content
from asfp.report.plot import page_data, safe_json
from asfp.report.sections import body

LARGEST = 8 * 2**20
"""Bytes of a page."""


def page(content: Content, every: float = 0.0, version: str = "") -> str:
    """The page; with `every`, it asks the server for news every so many seconds."""
    style, script = _file("page.css"), _file("page.js")
    library = plotly_script()
    live = f' data-every="{every:g}" data-version="{escape(version)}"' if every else ""
    scripts = " ".join(f"'sha256-{_digest(text)}'" for text in (library, script))
    connect = "'self'" if every else "'none'"
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en" data-theme="light"{live}>
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="asfp report">
<link rel="icon" href="data:,">
<title>{escape(content.title)}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">To the results</a>
<noscript><p>The figures need JavaScript; the tables below do without.</p></noscript>
<div id="content">{body(content)}</div>
<footer><p class="soft">Made by <code>asfp report</code> from the files of the runs. Figures can be zoomed;
a double click goes back.</p></footer>
<script type="application/json" id="data">{safe_json(page_data(content))}</script>
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""


def check_page(path: Path) -> None:
    """Refuse a path that no page can be written to.

    >>> check_page(Path("report.html"))
    """
    if not path.parent.is_dir():
        raise AsfpError(f"there is no folder {str(path.parent)!r} to write {path.name} in: make it first")
    if path.is_dir():
        raise AsfpError(f"{str(path)!r} is a folder: give a file to write, e.g. -o {path / 'report.html'}")


def write_page(content: Content, path: Path) -> int:
    """Write the page, whole or not at all; the bytes that it has."""
    check_page(path)
    text = page(content).encode()
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        mask = os.umask(0o022)
        os.umask(mask)
        part.chmod(0o666 & ~mask)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return len(text)


@cache
def plotly_script() -> str:
    """plotly.js, out of the plotly package; fit to stand inside a <script>."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise AsfpError(
            "the report's page needs plotly: pip install 'asfp[report]' (or pip install plotly); "
            "asfp report --text and --figures do without"
        ) from error
    text = str(get_plotlyjs())
    if "</script" in text.lower() or "<!--" in text:
        text = text.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    return text


@cache
def _file(name: str) -> str:
    return resources.files("asfp.report").joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
