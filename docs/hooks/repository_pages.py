"""MkDocs hook: adds pages and pictures from outside docs/ to the site, and adapts the links to them.

Links in docs/ are relative to the repository, so that they work on GitHub. On the site, a link to a
file that is no page becomes the path of that file.
"""

import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

log = logging.getLogger("mkdocs.hooks.repository_pages")

ROOT = Path(__file__).resolve().parents[2]
TOP_PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
PICTURES = (".png", ".webp")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
SOURCE = re.compile(r'(<img src=")([^"]+)"')
LOADED = re.compile(
    r'<(?:img|script|iframe|link)[^>]+(?:src|href)="?(?:https?:)?//[^">]+'
    r'|url\(["\']?(?:https?:)?//[^)]+|@import[^;]+//[^;]+'
)
"""What a browser would fetch from another host."""
FENCED = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    for name in TOP_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    named = {target for page in ROOT.glob("docs/*.md") for target in pictures_of(page)}
    for picture in sorted(named):
        files.append(File.generated(config, picture.name, abs_src_path=str(picture)))
    return files


def on_post_build(config: Any, **_: Any) -> None:
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css"):
            for found in LOADED.findall(path.read_text()):
                log.warning("%s loads from another host: %s", path.name, found)


def pictures_of(page: Path) -> set[Path]:
    text = page.read_text()
    targets = [target for _, target in SOURCE.findall(text)] + [link[2] for link in LINK.findall(text)]
    return {(page.parent / target).resolve() for target in targets if target.endswith(PICTURES)}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = page.file.src_uri
    folder = ROOT if source in TOP_PAGES else ROOT / "docs"

    def adapted(match: re.Match[str]) -> str:
        mark, text, target, anchor = match.groups()
        if not target or "://" in target:
            return match[0]
        path = (folder / target).resolve()
        if not path.exists():
            log.warning("%s: %s does not exist", source, target)
            return match[0]
        on_site = site_path(path)
        if on_site is not None:
            return f"{mark}[{text}]({on_site}{anchor or ''})"
        name = os.path.relpath(path, ROOT)
        return f"`{name}`" if text.strip("`") in (name, path.name) else f"{text} (`{name}`)"

    def shown(match: re.Match[str]) -> str:
        return f'{match[1]}{Path(match[2]).name}"'

    parts = FENCED.split(markdown)  # the odd parts are code
    return "".join(part if at % 2 else SOURCE.sub(shown, LINK.sub(adapted, part)) for at, part in enumerate(parts))


def site_path(path: Path) -> str | None:
    """Return the path of a file on the site, or None if the site does not have it."""
    if path.parent == ROOT / "docs" or path.suffix in PICTURES:
        return path.name
    if path == ROOT / "README.md":
        return "index.md"
    return path.name if path.parent == ROOT and path.name in TOP_PAGES else None
