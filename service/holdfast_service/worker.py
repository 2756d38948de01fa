"""One working process: the controllers without HTTP, until SIGTERM or SIGINT. Any number of them share one Postgres."""

from __future__ import annotations

import signal
from collections.abc import Callable

from sqlalchemy import make_url

from holdfast_service.background.registry import Background, loops_of
from holdfast_service.context import ServiceContext
from holdfast_service.service import close_service, open_service
from holdfast_service.settings import ServiceSettings, SettingsError

_ENDINGS = (signal.SIGTERM, signal.SIGINT)


def work(settings: ServiceSettings, on_ready: Callable[[ServiceContext], None]) -> None:
    """Returns after the steps in hand have ended, within HOLDFAST_SHUTDOWN_SECONDS. What is left then is cut off:
    another process takes it up when its lease has run out.

    Raises SettingsError and ProblemError(`database_unavailable`).
    """
    refuse_sqlite(settings, "`holdfast workers run` is one process of several")
    context = open_service(settings)
    try:
        # Blocked in every thread and waited for in this one: a handler could run in the middle of anything.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)
        background = Background(context, loops_of(settings), "worker")
        background.start()
        on_ready(context)
        signal.sigwait(_ENDINGS)
        background.stop(timeout_seconds=settings.shutdown_seconds)
    finally:
        close_service(context)


def refuse_sqlite(settings: ServiceSettings, what: str) -> None:
    """A SQLite catalog has one process: it has no locks on rows, and its leases would not keep two apart."""
    if make_url(settings.database_url_text).get_backend_name() == "sqlite":
        raise SettingsError(
            f"HOLDFAST_DATABASE_URL names SQLite, and {what}. On SQLite one `holdfast serve` does everything; name a "
            "Postgres to share the work."
        )
