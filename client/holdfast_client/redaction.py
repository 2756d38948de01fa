"""Keeps query strings out of the logs of the HTTP libraries: a presigned URL's query is a secret while it lives."""

from __future__ import annotations

import logging

import httpx


class _WithoutQuery(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                str(value).partition("?")[0] if isinstance(value, str | httpx.URL) else value for value in record.args
            )
        return True


_FILTER = _WithoutQuery("holdfast-without-query")


def keep_queries_out_of_logs() -> None:
    """Both libraries log each URL, urllib3 at DEBUG and httpx at INFO. Safe to call again: a filter is kept once."""
    for name in ("httpx", "urllib3.connectionpool"):
        logging.getLogger(name).addFilter(_FILTER)
