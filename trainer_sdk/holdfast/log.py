"""What people read: one line per restore and per commit. Python shows INFO to nobody unless somebody asks; we do, where
the training script does not set logging up itself.
"""

from __future__ import annotations

import logging


def speak_up() -> None:
    """Makes the lines of `holdfast` visible on stderr, for as long as the root logger has no handler. Once."""
    logger = logging.getLogger("holdfast")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s holdfast: %(message)s", datefmt="%H:%M:%S"))
        handler.addFilter(lambda _: not logging.getLogger().handlers)
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
