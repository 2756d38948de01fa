"""Prints words on the screen; only this file and `output.py` (tables and JSON) print.

Words may come from a job, a store or another person, and a terminal obeys escape sequences: characters that are no text
are shown as a mark. The help of the command line needs only this file, so it imports nothing that is slow to load.
"""

from __future__ import annotations

import sys

from holdfast_protocol.text import printable


def show_line(text: str) -> None:
    """On stdout, at once: the result. A program behind a pipe waits for it."""
    sys.stdout.write(printable(text) + "\n")
    sys.stdout.flush()


def show_note(text: str) -> None:
    """On stderr: notes beside it."""
    sys.stderr.write(printable(text) + "\n")
