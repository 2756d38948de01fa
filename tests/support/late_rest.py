"""The rest of a streamed restore that is read only when something waits for it, as if the store were very slow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from holdfast.distributed.background_verdict import BackgroundVerdict
from holdfast.restore.streamed_rest import Rest, RestGate, StreamedRest

_SECONDS = 120


class LateRest:
    def __init__(self) -> None:
        self.begun: list[StreamedRest] = []
        self.waited = 0
        """How often something has waited."""
        self._let_go: dict[StreamedRest, threading.Event] = {}

    def let_go(self) -> StreamedRest:
        """The last rest is read, though nothing waits for it. Returns when it is there on all ranks, or lost."""
        coming = self.begun[-1]
        self._let_go[coming].set()
        assert coming.is_over.wait(_SECONDS)
        return coming


@contextmanager
def late_rest() -> Iterator[LateRest]:
    late = LateRest()
    begin, wait = StreamedRest.__init__, RestGate._await

    def begin_late(coming: StreamedRest, rest: Rest, verdict: BackgroundVerdict) -> None:
        let_go = late._let_go[coming] = threading.Event()
        late.begun.append(coming)

        def read() -> int:
            assert let_go.wait(_SECONDS), "nothing has waited for the rest"
            return rest.read()

        def stop_reading() -> None:
            rest.stop_reading()
            let_go.set()

        begin(coming, replace(rest, read=read, stop_reading=stop_reading), verdict)

    def wait_late(gate: RestGate, coming: StreamedRest) -> None:
        late.waited += not coming.is_over.is_set()
        late._let_go[coming].set()
        wait(gate, coming)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamedRest, "__init__", begin_late)
        patch.setattr(RestGate, "_await", wait_late)
        yield late
