"""Logs: one line per event on stderr, JSON unless a person looks at a terminal.

Every library's records go the same way. Tokens and query strings (which hold signatures) are taken out of every value,
and so are the characters that a terminal obeys, wherever they come from. A traceback never shows local variables: they
may be secrets.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
from structlog.typing import EventDict, Processor

from holdfast_protocol.text import printable, without_secrets
from holdfast_service.settings import ServiceSettings


def configure_logging(settings: ServiceSettings) -> None:
    as_json = settings.log_format == "json" or (settings.log_format == "auto" and not sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _make_safe,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    renderer: Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    logging.getLogger("uvicorn.access").disabled = True  # web/frame.py logs requests, without query strings
    for noisy in ("azure", "botocore", "urllib3", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


_OF_LINES = frozenset({"exception", "stack"})


def _make_safe(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """The last processor before rendering. Whatever was logged, no secret leaves the process, and a path that a
    stranger made up is one line without what a terminal obeys."""
    event.pop("color_message", None)  # uvicorn's message once more, with terminal codes
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = printable(without_secrets(value), one_line=key not in _OF_LINES)
    return event
