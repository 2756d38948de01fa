"""The web page as scripts/prepare-web builds it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast_service.ui.endpoints import BUILT_INTO
from tests.support.prepare import NotHereError, prepare


def built_page() -> Path:
    """The folder that the service serves. Skips the test on a machine that has no Node to build it with."""
    try:
        prepare("web", "web", sys.prefix)
    except NotHereError as missing:
        # pip cannot install Node.js, and the service runs without a page.
        pytest.skip(str(missing))
    return BUILT_INTO
