"""What the tests hold in their hands: the script of faults, the switch for an outage, and the record of what came."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.support.fault_proxy.calls import calls_of
from tests.support.fault_proxy.faults import Fault
from tests.support.fault_proxy.passing import Listener
from tests.support.ports import free_ports


@dataclass
class Seen:
    """One request. `status` is what the server answered; None if it was not asked or did not answer. `by_url`: an S3
    server allows it by what its URL says, as a ticket's. What the service itself asks of its store has a header."""

    number: int
    method: str
    path: str
    calls: frozenset[str]
    by_url: bool = False
    fault: Fault | None = None
    status: int | None = None


@dataclass
class _Rule:
    fault: Fault
    on: str | Callable[[Seen], bool]
    skip: int
    times: int | None

    def take(self, seen: Seen) -> bool:
        fits = self.on in seen.calls if isinstance(self.on, str) else self.on(seen)
        if not fits or self.times == 0:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times = None if self.times is None else self.times - 1
        return True


@dataclass
class _Storm:
    rng: random.Random
    share: float
    faults: Sequence[Fault]


@dataclass
class FaultProxy:
    """Listens on `port` in front of 127.0.0.1:`server_port`, which it asks anew for each request."""

    server_port: int
    port: int = field(default_factory=free_ports)
    seen: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rules: list[_Rule] = []
        self._storm: _Storm | None = None
        self._changed = threading.Condition()
        self._listener: Listener | None = None
        self.accept()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def script(self, fault: Fault, on: str | Callable[[Seen], bool], *, skip: int = 0, times: int | None = 1) -> None:
        """Does this to the requests that are the call `on` (calls.py) or for which it is true: to so many (None: to
        all) after the first `skip`. Earlier rules come first."""
        with self._changed:
            self._rules.append(_Rule(fault, on, skip, times))

    def storm(self, seed: int, share: float, faults: Sequence[Fault]) -> None:
        """Does one of these to a random share of all requests."""
        with self._changed:
            self._storm = _Storm(random.Random(seed), share, faults)

    def heal(self) -> None:
        """No faults any more; what is seen from now on is a new list."""
        with self._changed:
            self._rules.clear()
            self._storm = None
            self.seen = []

    def refuse(self) -> None:
        """An outage: connections end, and new ones are refused."""
        if self._listener is not None:
            self._listener.end()
            self._listener = None

    def accept(self) -> None:
        """The end of an outage."""
        if self._listener is None:
            self._listener = Listener(self)

    def count(self, call: str) -> int:
        with self._changed:
            return sum(call in seen.calls for seen in self.seen)

    def struck(self) -> list[Seen]:
        """What met a fault."""
        with self._changed:
            return [seen for seen in self.seen if seen.fault is not None]

    def wait_for(self, call: str, count: int, timeout_seconds: float = 60.0) -> None:
        """Until so many of these were answered by the server. Raises AssertionError if they do not come."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: sum(call in seen.calls and seen.status is not None for seen in self.seen) >= count,
                timeout_seconds,
            ), f"{count} x {call} did not come: {self.seen}"

    def close(self) -> None:
        self.refuse()

    def met(self, method: str, path: str, body: bytes | None, *, by_url: bool) -> Seen:
        """Notes a request, and with it what shall happen to it."""
        with self._changed:
            seen = Seen(len(self.seen), method, path, calls_of(method, path, body), by_url)
            self.seen.append(seen)
            rule = next((rule for rule in self._rules if rule.take(seen)), None)
            if rule is not None:
                seen.fault = rule.fault
            elif self._storm is not None and self._storm.rng.random() < self._storm.share:
                seen.fault = self._storm.rng.choice(self._storm.faults)
            return seen

    def answered(self, seen: Seen, status: int) -> None:
        with self._changed:
            seen.status = status
            self._changed.notify_all()


@contextmanager
def fault_proxy(server_port: int) -> Iterator[FaultProxy]:
    proxy = FaultProxy(server_port)
    try:
        yield proxy
    finally:
        proxy.close()
