"""A real Chromium for the tests: Debian's, unpacked by scripts/prepare-chromium and driven by Playwright, which
downloads no browser of its own.

It starts as root and without a screen, from an empty profile, with libraries and fonts of the unpacked packages, and
calls nobody by itself. The fonts are these alone, so a page looks the same on every machine.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

_SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare-chromium"
_NO_APT = 69
_UNPACKS_WITHIN_SECONDS = 280
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


class NoChromiumError(Exception):
    """This machine has no apt to get Chromium with."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with an empty profile. While it runs, this thread has an event loop. Raises NoChromiumError."""
    home = _unpacked()
    libraries = [*home.glob("usr/lib/*-linux-gnu"), *home.glob("usr/lib/*-linux-gnu/*/")]
    fonts = home / "fonts.conf"
    environment = {
        "PATH": os.environ["PATH"],
        "LD_LIBRARY_PATH": os.pathsep.join(str(folder) for folder in libraries),
        "FONTCONFIG_FILE": str(fonts),
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=home / "usr" / "lib" / "chromium" / "chromium",
            args=_FLAGS,
            chromium_sandbox=False,
            env=environment,
        )
        try:
            yield browser
        finally:
            browser.close()


def _unpacked() -> Path:
    environment = Path(sys.prefix)
    with (environment / ".chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [str(_SCRIPT), str(environment)], capture_output=True, text=True, timeout=_UNPACKS_WITHIN_SECONDS
        )
        if done.returncode == _NO_APT:
            raise NoChromiumError(done.stderr.strip())
        if done.returncode != 0:
            raise RuntimeError(f"Chromium could not be unpacked: {done.stderr.strip()[-2000:]}")
        home = environment / "chromium"
        (home / "fonts.conf").write_text(_FONTS.format(home=home), encoding="utf-8")
    return home
