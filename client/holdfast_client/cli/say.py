"""The one way of words to the screen, apart from tables and JSON (`output.py`): nothing else prints.

Words may come from a job, a store or another person, and a terminal obeys escape sequences: what is no text is shown as
a mark. The help of the command line needs no more than this file, so it imports nothing that is slow to load.
"""

from __future__ import annotations

import sys

from holdfast_protocol.text import printable


def show_line(text: str) -> None:
    """On stdout: what was asked for."""
    sys.stdout.write(printable(text) + "\n")


def show_note(text: str) -> None:
    """On stderr: what is good to know beside it."""
    sys.stderr.write(printable(text) + "\n")
