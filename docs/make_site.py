"""MkDocs hook: adds the root's pages, and replaces what leads to sources, which the site does not have.

README.md is the site's first page. A link to another file of the repository becomes the file's name; a link
to a file that does not exist ends a strict build. A line that is only a link to a YAML file becomes the file.
The lines on an object of the Python API become its docstring.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Page of the site: file of the root.
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s#]+)(#[^()\s]*)?\)")
_LISTED = re.compile(r"^\[`(\S+\.yaml)`\]\(\S+\)$", re.MULTILINE)
_OBJECT = re.compile(r"^### (\S+)\n\n<!-- (\S+) -->\n(?:.+\n)+", re.MULTILINE)
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LOG = logging.getLogger("mkdocs.hooks.make_site")


def on_files(files: Files, config: Any) -> Files:
    """Add the root's pages."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page."""
    return rewritten(markdown, page.file.src_uri)


def rewritten(markdown: str, page: str) -> str:
    """The text of a page with its links rewritten to pages of the site.

    Args:
        markdown: The text; code in it is left alone.
        page: Path below docs/; the root's pages have links from there.
    """
    source = PAGES.get(page, posixpath.join("docs", page))
    folder = posixpath.dirname(source)

    def lead(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if not (ROOT / path).exists():
            _LOG.warning("%s has a link to %s, which does not exist", source, path)
            return match[0]
        inside = _page_of(path)
        if inside is None:
            return text if text == path or text.startswith("`") else f"{text} (`{path}`)"
        return f"[{text}]({posixpath.relpath(inside, posixpath.dirname(page) or '.')}{anchor})"

    markdown = _OBJECT.sub(r"::: \2\n    options: {heading: \1}\n", markdown)
    markdown = _LISTED.sub(lambda m: f"```yaml\n{(ROOT / m[1]).read_text()}```", markdown)
    parts = _FENCED.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(lead, part) for part in parts)


def _page_of(path: str) -> str | None:
    """The site's page of a file of the repository, if it has one."""
    for page, source in PAGES.items():
        if path == source:
            return page
    if path == "docs/adr":
        return "adr/README.md"
    return path.removeprefix("docs/") if re.fullmatch(r"docs/.*\.md", path) else None
