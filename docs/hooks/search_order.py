"""MkDocs hook: ranks pages in the search, without front matter, which GitHub would show as a table."""

from typing import Any

EXCLUDED = ("CHANGELOG.md", "index.md")
"""Pages that mention every subject and explain none."""
BOOST = {
    "troubleshooting.md": 2.0,
    "CONTRIBUTING.md": 0.5,
    "benchmarks.md": 0.5,
    "benchmarks-training.md": 0.5,
    "benchmarks-learning.md": 0.5,
    "chaos.md": 0.5,
    "comparison.md": 0.5,
}
"""Weight of a page; 1 is that of the others."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    name = page.file.src_uri
    if name in EXCLUDED:
        page.meta["search"] = {"exclude": True}
    elif name in BOOST:
        page.meta["search"] = {"boost": BOOST[name]}
    return markdown
