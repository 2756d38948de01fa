"""Makes the pictures of the web page that the documentation shows: docs/pictures/, each screen in light and in dark.

    PYTHONPATH=. .venv/bin/python scripts/take_pictures.py

It runs the demo (`make demo LOOK=yes`), and looks at its runs with the browser of tests/web.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, expect
from tests.web.chromium import chromium

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
_SIZE = {"width": 1280, "height": 800}
_SHOWN_WITHIN_MS = 60_000


@contextmanager
def demo() -> Iterator[str]:
    """Runs the demo. Gives the link to its page when its runs are there, and stops it afterwards."""
    command = [sys.executable, str(ROOT / "examples" / "demo" / "orchestrate.py"), "--look"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            yield next(found[0] for line in running.stdout if (found := re.search(r"http://\S+/ui/#code=\S+", line)))
        finally:
            running.send_signal(signal.SIGINT)
            running.stdout.read()  # what it prints at its end has a reader


def screens(page: Page, site: str) -> dict[str, str]:
    """From a picture's name to the address of what it shows."""
    newest = page.request.get(f"{site}/v1/projects/demo/runs/gpt/checkpoints").json()["items"][0]
    return {
        "overview": "",
        "run": "runs/gpt?project=demo",
        "checkpoint": f"checkpoints/{newest['id']}",
        "retention": "retention?project=demo&run=gpt",
        "storage": "storage?project=demo",
        "operations": "operations/events",
    }


def take(page: Page, name: str) -> None:
    page.get_by_role("heading", level=1).wait_for()
    expect(page.get_by_role("status").filter(has_text=re.compile("^Loading"))).to_have_count(0)
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        expect(page.locator("html")).to_have_attribute("data-theme", theme)
        page.screenshot(path=PICTURES / f"{name}-{theme}.png", animations="disabled")


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    expect.set_options(timeout=_SHOWN_WITHIN_MS)
    with demo() as link, chromium() as browser:
        page = browser.new_page(viewport=_SIZE, locale="en-GB", timezone_id="UTC", reduced_motion="reduce")
        page.goto(link)
        page.get_by_role("heading", level=1, name="Overview").wait_for(timeout=_SHOWN_WITHIN_MS)
        site = link.partition("/ui/")[0]
        for name, address in screens(page, site).items():
            page.goto(f"{site}/ui/{address}")
            take(page, name)


if __name__ == "__main__":
    main()
