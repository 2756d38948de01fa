"""The documentation builds strictly as a site, and its pages load nothing from another host: it can be read offline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ANCHORS = {"a"}
"""What a reader may click is not loaded."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class _Loads(HTMLParser):
    """The addresses that a browser asks for by itself when it shows a page, and the page's classes."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.classes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "class":
                self.classes |= set((value or "").split())
            if value and name in ("src", "srcset", "href", "data", "poster", "action") and tag not in ANCHORS:
                self.addresses.append(value)
            if value and name == "style":
                self.addresses += re.findall(r"url\(['\"]?([^'\")]+)", value)


def is_elsewhere(address: str) -> bool:
    return bool(re.match(r"(?:[a-z]+:)?//", address))


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loads = _Loads()
        loads.feed(text)
        styles = re.findall(r"<style[^>]*>(.*?)</style>", text, flags=re.DOTALL)
        inline = [url for style in styles for url in re.findall(r"url\(['\"]?([^'\")]+)", style)]
        assert not [each for each in (*loads.addresses, *inline) if is_elsewhere(each)], page.name
        # The theme's script fetches mermaid for a page that has a diagram in it, from another host.
        assert "mermaid" not in loads.classes, page.name


def test_no_style_sheet_or_picture_loads_anything_from_another_host(site: Path) -> None:
    for path in (*site.rglob("*.css"), *site.rglob("*.svg")):
        text = path.read_text(encoding="utf-8")
        loaded = re.findall(r"url\(['\"]?([^'\")]+)|@import ['\"]([^'\"]+)|href=['\"]([^'\"]+)", text)
        assert not [each for found in loaded for each in found if is_elsewhere(each)], path.name


def test_what_a_page_loads_is_in_the_folder(site: Path) -> None:
    """So that it can be opened from the disk. 404.html is for servers: its addresses begin at the root."""
    for page in site.rglob("*.html"):
        loads = _Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        for address in loads.addresses:
            file = re.split(r"[?#]", address)[0]
            if file and not file.startswith(("data:", "/")):
                assert (page.parent / file).exists(), f"{page.name}: {address}"


def test_the_references_are_made_of_the_code(site: Path) -> None:
    python = (site / "reference" / "python.html").read_text(encoding="utf-8")
    assert 'id="holdfast.checkpointer.Checkpointer.restore"' in python
    rest = (site / "reference" / "rest.html").read_text(encoding="utf-8")
    assert "/v1/projects" in rest
    assert "stale_attempt" in (site / "reference" / "problems.html").read_text(encoding="utf-8")
