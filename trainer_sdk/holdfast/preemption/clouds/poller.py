"""The thread that asks the cloud, and decides which of its answers is a notice now.

A distant event is no notice yet: the machine is paid for until then, and a job that left at once and came back to the
same machine would leave again. It is logged, and becomes a notice `lead_seconds` before its time.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable

from holdfast.preemption.clouds.event import CloudEvent, CloudSource
from holdfast.preemption.clouds.metadata_server import MetadataError, MetadataServer
from holdfast.preemption.notice import Notice

log = logging.getLogger("holdfast")

_LONGEST_PAUSE_SECONDS = 30.0


class CloudPoller:
    """Begins at once, and ends with close() or with the process.

    `on_notice` and `on_hint` are called on its thread, once for each event.
    """

    def __init__(
        self,
        source: CloudSource,
        server: MetadataServer,
        *,
        on_notice: Callable[[Notice], None],
        on_hint: Callable[[Notice], None],
        lead_seconds: float,
    ) -> None:
        self._source = source
        self._server = server
        self._on_notice = on_notice
        self._on_hint = on_hint
        self._lead_seconds = lead_seconds
        self._given: set[str] = set()
        self._announced: set[str] = set()
        self._failures = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"holdfast-{source.name}-notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Also ends a running request."""
        self._stop.set()
        self._server.close()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while True:
            try:
                self._look()
            except Exception:  # of the script's log handler, say: without this thread no notice of the cloud arrives
                with contextlib.suppress(Exception):  # the hook may be the script's too
                    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            # An unavailable server is asked less often, but often enough for a notice of two minutes.
            pause = min(self._source.pause_seconds * 2 ** min(self._failures, 5), _LONGEST_PAUSE_SECONDS)
            if self._stop.wait(pause):
                return

    def _look(self) -> None:
        try:
            for event in self._source.look():
                self._weigh(event)
            self._answers_again()
        except MetadataError as error:
            self._missed(error)

    def _weigh(self, event: CloudEvent) -> None:
        if event.key in self._given:
            return
        notice = Notice(self._source.name, event.reason, event.deadline_seconds)
        if event.is_hint:
            self._given.add(event.key)
            self._on_hint(notice)
        elif event.deadline_seconds is None or event.deadline_seconds <= self._lead_seconds:
            self._given.add(event.key)
            self._on_notice(notice)
        elif event.key not in self._announced:
            self._announced.add(event.key)
            log.warning(
                "%s announces: %s, in %.0f s; the job saves and leaves %.0f s before",
                self._source.name,
                event.reason,
                event.deadline_seconds,
                self._lead_seconds,
            )

    def _missed(self, error: MetadataError) -> None:
        self._failures += 1
        if self._failures == 1 and not self._stop.is_set():
            log.warning(
                "no notice from %s can arrive at present: %s. It is asked again; this is logged once. In a container "
                "the metadata server must be reachable; HOLDFAST_PREEMPTION_CLOUD=none stops the asking",
                self._source.name,
                error,
            )

    def _answers_again(self) -> None:
        if self._failures:
            self._failures = 0
            log.info("%s's metadata server answers again", self._source.name)
