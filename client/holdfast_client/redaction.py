"""Keeps secrets out of the logs of the HTTP libraries, and out of what is told of an error: a presigned URL's query is
a secret while it lives."""

from __future__ import annotations

import logging
import re

import httpx

_SECRETS = (
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]+@", re.IGNORECASE), r"\1"),  # user and password of a URL
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s?'\"]*)\?[^\s'\"]+", re.IGNORECASE), r"\1"),  # its query
    (re.compile(r"\bhold_[0-9a-f]{16}_[0-9a-f]{64}\b"), "a token"),
)


def without_secrets(text: str) -> str:
    """`text`, which may be anybody's error message, without URLs' queries and passwords, and without our tokens."""
    for secret, instead in _SECRETS:
        text = secret.sub(instead, text)
    return text


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
