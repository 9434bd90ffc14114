"""MkDocs hook: lets long names in tables break after a dot, slash or underscore, not inside a word.

It runs after the search index was built, so that the search finds whole names.
"""

import re
from typing import Any

CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
CODE = re.compile(r"(?<=<code>)[^<>]*(?=</code>)")
AFTER = re.compile(r"(?<=[\w\]])([./_]+)(?=\w)")


def on_post_page(output: str, **_: Any) -> str:
    return CELL.sub(lambda cell: CODE.sub(breakable, cell[0]), output)


def breakable(code: re.Match[str]) -> str:
    return AFTER.sub(r"\1<wbr>", code[0])
