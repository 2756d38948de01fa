"""Makes the pictures of the web page that the documentation shows: docs/pictures/, each screen in light and in dark.

    PYTHONPATH=. .venv/bin/python scripts/take_pictures.py

It runs the demo (`make demo LOOK=yes`), and looks at its runs with the browser of tests/web: at the overview while one
trains, after both kills, and at the other screens when all is over.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from playwright.sync_api import Page, expect
from tests.web.chromium import chromium

from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
_SIZE = {"width": 1280, "height": 1000}
_SHOWN_WITHIN_MS = 60_000


class Demo:
    def __init__(self, said: IO[str], folder: Path) -> None:
        self._said = said
        self._folder = folder

    def says(self, pattern: str) -> re.Match[str]:
        """As soon as it does. Raises RuntimeError if it ends before."""
        for line in self._said:
            if found := re.search(pattern, line):
                return found
        raise RuntimeError(f"the demo ended, and did not say {pattern!r}")

    def client(self) -> Client:
        url = self.says(r"the service runs: .* (http://\S+)$")[1]
        return Client(ClientSettings(url=url, data_dir=next(self._folder.glob("holdfast-demo-*/data"))))


@contextmanager
def demo() -> Iterator[Demo]:
    """Stopped afterwards."""
    command = [sys.executable, str(ROOT / "examples" / "demo" / "orchestrate.py"), "--look"]
    with TemporaryDirectory() as folder:
        environment = os.environ | {"TMPDIR": folder}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            try:
                yield Demo(running.stdout, Path(folder))
            finally:
                running.send_signal(signal.SIGINT)
                running.stdout.read()  # what it prints at its end has a reader


def screens(page: Page, site: str) -> dict[str, str]:
    """From a picture's name to the address of what it shows."""
    newest = page.request.get(f"{site}/v1/projects/demo/runs/gpt/checkpoints").json()["items"][0]
    return {
        "run": "runs/gpt?project=demo",
        "checkpoint": f"checkpoints/{newest['id']}",
        "retention": "retention?project=demo&run=gpt",
        "storage": "storage?project=demo",
        "operations": "operations/events",
    }


def take(page: Page, name: str) -> None:
    page.get_by_role("heading", level=1).wait_for()
    expect(page.get_by_role("status").filter(has_text=re.compile("^Loading"))).to_have_count(0)
    expect(page.get_by_text("…", exact=True)).to_have_count(0)  # a number that is on its way
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        expect(page.locator("html")).to_have_attribute("data-theme", theme)
        page.screenshot(path=PICTURES / f"{name}-{theme}.png", animations="disabled")


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    expect.set_options(timeout=_SHOWN_WITHIN_MS)
    with demo() as running, chromium() as browser, running.client() as client:
        site = client.settings.url
        page = browser.new_page(viewport=_SIZE, locale="en-GB", timezone_id="UTC", reduced_motion="reduce")
        page.goto(f"{site}/ui/#code={client.tokens.sign_in_code().code}")
        page.get_by_role("heading", level=1, name="Overview").wait_for(timeout=_SHOWN_WITHIN_MS)
        running.says("killed while the save of step")
        page.get_by_role("region", name="Live runs").get_by_role("link", name="gpt").wait_for(timeout=_SHOWN_WITHIN_MS)
        take(page, "overview")
        running.says("in another shell")
        for name, address in screens(page, site).items():
            page.goto(f"{site}/ui/{address}")
            take(page, name)


if __name__ == "__main__":
    main()
