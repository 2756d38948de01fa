"""A real Chromium for the tests: Debian's, unpacked by scripts/prepare-debian and driven by Playwright, which
downloads no browser of its own.

It starts as root and without a screen, from an empty profile, with libraries and fonts of the unpacked packages, and
calls nobody by itself. The fonts are these alone, so a page looks the same on every machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, BrowserContext, sync_playwright

from tests.support.debian import unpacked

BUSY_SECONDS = 90
"""What a test waits for comes at once. A busy machine takes its time."""
_BINARY = "usr/lib/chromium/chromium"
_FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--font-render-hinting=none",
)
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig>
  <dir>{home}/usr/share/fonts</dir>
  <cachedir>{home}/fonts-cache</cachedir>
  <alias><family>sans-serif</family><prefer><family>DejaVu Sans</family></prefer></alias>
  <alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
</fontconfig>
"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with an empty profile. While it runs, this thread has an event loop. Raises NotHereError."""
    home = unpacked("chromium", _BINARY, "chromium-common", "fonts-dejavu-core")
    libraries = [*home.glob("usr/lib/*-linux-gnu"), *home.glob("usr/lib/*-linux-gnu/*/")]
    fonts = home / "fonts.conf"
    fonts.write_text(_FONTS.format(home=home), encoding="utf-8")
    environment = {
        "PATH": os.environ["PATH"],
        "LD_LIBRARY_PATH": os.pathsep.join(str(folder) for folder in libraries),
        "FONTCONFIG_FILE": str(fonts),
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=home / _BINARY,
            args=_FLAGS,
            chromium_sandbox=False,
            env=environment,
            timeout=1000 * BUSY_SECONDS,
        )
        try:
            yield browser
        finally:
            browser.close()


def new_context(browser: Browser, **more: Any) -> BrowserContext:
    """One that looks the same on each machine; a page of it may read the clipboard."""
    usual: dict[str, Any] = {"locale": "en-GB", "timezone_id": "UTC", "reduced_motion": "reduce"}
    made = browser.new_context(**{**usual, "permissions": ["clipboard-read", "clipboard-write"], **more})
    made.set_default_timeout(1000 * BUSY_SECONDS)
    return made
