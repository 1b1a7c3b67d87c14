"""For mkdocs: files of the repository that pages link to are not part of the site; they are named instead."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """`[text](../path)` becomes the text with the path behind it."""
    return OUTSIDE.sub(r"\1 (`\2`)", markdown)
