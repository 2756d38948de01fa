"""What mkdocs does beside its own: pages from outside of docs/, made pages, and links that work in both places.

A page's links are those of the repository, so that it reads well there. On the site a link to another page leads to
that page, and a link to any other file of the repository (a test, an example) to a copy of its text below `source/`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

from rest_reference import problems_page, rest_page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
"""Pages of the repository that are not in docs/, and where they are on the site."""
MADE = {"reference/rest.md": rest_page, "reference/problems.md": problems_page}
_LINK = re.compile(r"(\]\(|\bsrc(?:set)?=\")([^)\"#\s]+)(#[^)\"\s]*)?([)\"])")
"""Of Markdown, and of a `<picture>`, which is HTML: only that shows one image in the dark and another in the light."""
_FENCE = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)
_SOURCE = "source"


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    for page, make in MADE.items():
        files.append(File.generated(config, page, content=make()))
    for linked in sorted(_linked_files()):
        text = (ROOT / linked).read_text(encoding="utf-8")
        files.append(File.generated(config, _source_of(linked), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The same text with links that lead somewhere on the site."""
    here = page.file.src_uri
    path = next((path for path, uri in OUTSIDE.items() if uri == here), f"docs/{here}")

    def on_the_site(link: re.Match[str]) -> str:
        target = _in_repository(path, link[2])
        if target is None:
            return link[0]
        uri = _on_site(target)
        return f"{link[1]}{posixpath.relpath(uri, posixpath.dirname(here) or '.')}{link[3] or ''}{link[4]}"

    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(on_the_site, part) for part in parts)


def _linked_files() -> set[str]:
    """Files of the repository that a page links and that are no pages themselves."""
    found = set()
    for page in [*(ROOT / path for path in OUTSIDE), *(ROOT / "docs").rglob("*.md")]:
        here = page.relative_to(ROOT).as_posix()
        text = _FENCE.sub("", page.read_text(encoding="utf-8"))
        targets = {_in_repository(here, link[2]) for link in _LINK.finditer(text)}
        found |= {target for target in targets if target and _on_site(target) == _source_of(target)}
    return found


def _in_repository(page: str, link: str) -> str | None:
    """The path from the repository's root that a page's link means; None for another host's, or nothing there."""
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    if (ROOT / target).is_dir():
        target = f"{target}/README.md"
    return target if (ROOT / target).is_file() else None


def _on_site(path: str) -> str:
    if path in OUTSIDE:
        return OUTSIDE[path]
    if PurePosixPath(path).parts[0] == "docs":
        return path.removeprefix("docs/")
    return _source_of(path)


def _source_of(path: str) -> str:
    """As text: a browser shows it, and nothing takes it for a page or a script."""
    return f"{_SOURCE}/{path}.txt"
