"""Who is worked on now, who waits and who is refused: each call with a token passes here before it uses a thread.

A process works on a few calls at once. The others wait on the event loop, where they hold no thread and no connection
of the database, and `web/fair_queue.py` says whose turn it is. A call holds no place while its body arrives, nor while
it waits for a checkpoint's outcome.

A call belongs to the project of its token. A token that is good for every project is trusted to name one in the path;
of a checkpoint's id this process knows the project if the checkpoint was begun here. Calls whose token was not seen
before share one project, so strangers cannot take more turns than one project has.

A token has limits of its own beside those of its project: `web/fair_queue.py`. All tokens that one identity got share
theirs. A call that the token's rate refuses does not count for the project's.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.requests import HTTPConnection

from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.principal import Principal
from holdfast_service.context import Load
from holdfast_service.errors import ProblemError
from holdfast_service.settings import ServiceSettings
from holdfast_service.web.fair_queue import (
    AGAIN_SECONDS,
    CallClass,
    FairQueue,
    Limit,
    Limits,
    Rates,
    Refusal,
    TokenLimit,
    TokenLimits,
    TokenRefusal,
)

_RUN = "/v1/projects/{project}/runs/{run}"
_CHECKPOINT = "/v1/checkpoints/{checkpoint_id}"
CLASSES: Mapping[tuple[str, str], CallClass] = {
    ("PUT", f"{_CHECKPOINT}/shards/{{rank}}"): CallClass.PROMISED,
    ("PUT", f"{_CHECKPOINT}/shards"): CallClass.PROMISED,
    ("POST", f"{_CHECKPOINT}/abort"): CallClass.PROMISED,
    ("POST", f"{_RUN}/attempts/{{number}}/heartbeat"): CallClass.PROMISED,
    ("POST", f"{_RUN}/attempts/{{number}}/end"): CallClass.PROMISED,
    ("GET", f"{_RUN}/attempts"): CallClass.RESTORE,  # a launch asks which attempt it comes after
    ("POST", f"{_RUN}/attempts"): CallClass.RESTORE,
    ("PUT", f"{_RUN}/attempts/{{number}}/resumed-from"): CallClass.RESTORE,
    ("GET", f"{_RUN}/restore-point"): CallClass.RESTORE,
    ("GET", _CHECKPOINT): CallClass.RESTORE,
    ("GET", f"{_CHECKPOINT}/manifest"): CallClass.RESTORE,
    ("GET", f"{_CHECKPOINT}/shards/{{rank}}"): CallClass.RESTORE,
    ("POST", f"{_CHECKPOINT}/reads"): CallClass.RESTORE,
    ("POST", f"{_CHECKPOINT}/chunk-reports"): CallClass.RESTORE,
    ("DELETE", "/v1/read-leases/{lease_id}"): CallClass.RESTORE,
    ("GET", "/v1/service"): CallClass.RESTORE,
    ("POST", "/v1/mount-proofs"): CallClass.RESTORE,
    ("POST", f"{_CHECKPOINT}/shards/{{rank}}/chunks"): CallClass.NEGOTIATE,
    ("POST", f"{_RUN}/checkpoints"): CallClass.BEGIN,
}
"""By method and path; all other calls are of the last class."""

STRANGERS = "(tokens not seen before)"
_NO_PROJECT = "(no project)"
_MANY_PROJECTS = "(others)"
_MOST_LABELS = 100
_CROWDED = 0.4
"""Of a core. Beside others on its machine a process that computes all the time may get half of one."""
_WAIT_BUCKETS_SECONDS = (0.005, 0.02, 0.1, 0.5, 2, 10, 30, 60)


def class_of(methods: Collection[str], path: str) -> CallClass:
    return next((CLASSES[method, path] for method in methods if (method, path) in CLASSES), CallClass.OTHER)


_P = ParamSpec("_P")
_T = TypeVar("_T")
_MOST_THREADS = 40
_THREADS: RunVar[anyio.CapacityLimiter] = RunVar("holdfast_threads_of_calls")


async def on_a_thread(work: Callable[_P, _T], *args: _P.args, **named: _P.kwargs) -> _T:
    """Does a call's work on one of the threads of calls. The framework's own send the objects of a posix store, and a
    mount that hangs keeps each of them that reads."""
    threads = _THREADS.get(None)
    if threads is None:
        threads = anyio.CapacityLimiter(_MOST_THREADS)
        _THREADS.set(threads)
    return await anyio.to_thread.run_sync(functools.partial(work, *args, **named), limiter=threads)


@dataclass(eq=False)
class _Waiter:
    """`turn` belongs to the event loop that waits. `has_turn` is read and written under the lock."""

    permit: Permit
    turn: asyncio.Future[None]
    has_turn: bool = False


@dataclass
class _Waits:
    """How many calls of each project go on for long without a place, and what to say to one too many."""

    setting: str
    what: str
    remedy: str
    of_project: dict[str, int] = field(default_factory=dict)


class _Interpreter:
    """Whether threads of this process wait for each other: it has used a good part of a core lately. One that waits for
    a slow database has time for more calls."""

    def __init__(self) -> None:
        self._seen_at, self._used = time.monotonic(), time.process_time()
        self._is_crowded = True

    def is_crowded(self, now: float) -> bool:
        passed = now - self._seen_at
        if passed >= AGAIN_SECONDS:
            used = time.process_time()
            self._is_crowded = used - self._used >= _CROWDED * passed
            self._seen_at, self._used = now, used
        return self._is_crowded


class Admission:
    """One per application. Its permits are used on event loops, of which there may be several."""

    def __init__(self, settings: ServiceSettings, load: Load, registry: CollectorRegistry) -> None:
        self._settings = settings
        self._load = load
        self._lock = threading.Lock()
        self._queue: FairQueue[_Waiter] = FairQueue(
            Limits(settings.requests_at_once, settings.project_requests, settings.most_requests)
        )
        self._tokens = TokenLimits(settings.token_burst_seconds)
        self._projects = Rates(settings.token_burst_seconds)
        self._exchanges = Rates(_EXCHANGES_BURST_SECONDS)
        self._long_polls = _Waits(
            "HOLDFAST_PROJECT_LONG_POLLS",
            "wait for an outcome",
            "Ask without `wait`, or wait with one call a host.",
        )
        self._streams = _Waits(
            "HOLDFAST_PROJECT_STREAMS",
            "follow events",
            "End those that nobody reads, or follow by one process for several readers.",
        )
        self._meter = _Meter(registry)
        self._interpreter = _Interpreter()
        self._loop: asyncio.AbstractEventLoop | None = None
        """Of the newest call."""
        self._deals_later = False

    def project_of(self, caller: Principal | None, path: Mapping[str, str]) -> str:
        """`caller`: who came with this token when it was last good; None: it was not seen here."""
        if caller is None:
            return STRANGERS
        return (
            caller.project_name
            or path.get("project")
            or self._load.project_of(path.get("checkpoint_id", ""))
            or f"{_NO_PROJECT} {caller.token_id}"
        )

    @contextmanager
    def call(self, connection: HTTPConnection, kind: CallClass, caller: Principal | None) -> Iterator[Permit]:
        """Counts a call until the block is left, which gives its place back. Raises `rate_limited` and `busy`."""
        project = self.project_of(caller, connection.path_params)
        permit = Permit(self, connection, project, kind)
        try:
            if caller is not None:
                self.count_call(permit, caller)
            with self._lock:
                of_several = project.startswith(_NO_PROJECT)
                is_known = project != STRANGERS and not of_several
                refusal = self._queue.let_in(project, kind, time.monotonic(), is_known=is_known, of_several=of_several)
            if refusal is not None:
                raise self._refused(project, refusal)
            try:
                yield permit
            finally:
                with self._lock:
                    self._give_back(permit)
                    self._queue.leave(project)
        except ProblemError as error:
            if "limit" in error.context:
                self._meter.count_refusal(permit.owner, kind, error.context["limit"])
            raise
        finally:
            if permit.counted_as is not None:
                with self._lock:
                    self._tokens.leave(permit.counted_as)

    def count_call(self, permit: Permit, caller: Principal) -> None:
        """Within the limits of the caller's token, and the rate of the call's project. Its reply tells what is left: of
        the project's rate, if that is less. Raises `rate_limited`."""
        if permit.kind is CallClass.PROMISED or permit.counted_as is not None:
            return
        settings, counted_as = self._settings, caller.counted_as
        per_second = settings.token_requests_per_second
        if caller.requests_per_second is not None:
            per_second = caller.requests_per_second
        most = settings.token_requests if caller.concurrent_requests is None else caller.concurrent_requests
        now = time.monotonic()
        with self._lock:
            bucket = self._tokens.bucket_of(counted_as, per_second, now)
            seconds = None if bucket is None else bucket.take(now)
            if bucket is not None:
                permit.connection.state.rate_limit = bucket.headers()
            if seconds is None:
                refusal = self._tokens.let_in(counted_as, permit.kind, most)
                permit.counted_as = counted_as if refusal is None else None
            else:
                refusal = TokenRefusal(TokenLimit.RATE, per_second, seconds)
        if refusal is not None:
            raise _token_refused(caller, refusal)
        self._count_project(permit, None if bucket is None else int(bucket.level))

    def _count_project(self, permit: Permit, left_of_token: int | None) -> None:
        per_second = self._settings.project_requests_per_second
        if permit.owner.startswith(_NO_PROJECT):
            return
        now = time.monotonic()
        with self._lock:
            bucket = self._projects.bucket_of(permit.owner, per_second, now)
            if bucket is None:
                return
            kept = bucket.kept_from(permit.kind)
            seconds = bucket.take(now, kept)
            if seconds is not None or left_of_token is None or bucket.level - kept < left_of_token:
                permit.connection.state.rate_limit = bucket.headers(kept)
        if seconds is not None:
            raise self._refused(permit.owner, Refusal(Limit.PROJECT_RATE, seconds))

    def count_exchange(self, permit: Permit, identity: str, rules: str) -> None:
        """Within the rate of tokens that one identity gets, and within ten times that rate for all whom the same rules
        let in. Raises `rate_limited`.

        Some callers choose a part of their identity: a branch of GitHub or GitLab, a service account of a namespace.
        Each new name has a rate of its own. No caller chooses the rules; the operator has written them. The rules
        alone would not do: one job that asks in a loop would keep its neighbours waiting."""
        now = time.monotonic()
        for counted_as, who, share in (
            (identity, "This identity has", 1),
            (rules, f"All whom {rules} lets in have together", _IDENTITIES_OF_A_RULE),
        ):
            per_second = self._settings.identity_exchanges_per_second * share
            with self._lock:
                bucket = self._exchanges.bucket_of(counted_as, per_second, now)
                if bucket is None:
                    return
                seconds = bucket.take(now)
                if counted_as == identity or seconds is not None:
                    permit.connection.state.rate_limit = bucket.headers()
            if seconds is not None:
                raise ProblemError(
                    ProblemCode.RATE_LIMITED,
                    f"{who} got more than {per_second:g} tokens a second in this process ({_EXCHANGES_SETTING}). Use a "
                    f"token until half of its life is over. Try again in {seconds} s.",
                    limit=_EXCHANGES_SETTING,
                    retry_after_seconds=seconds,
                )

    async def take(self, permit: Permit) -> None:
        loop = asyncio.get_running_loop()
        waiter = _Waiter(permit, loop.create_future())
        with self._lock:
            if self._loop is not loop:
                self._loop, self._deals_later = loop, False
            self._queue.wait(permit.project, permit.kind, waiter)
            if self._deal(mine=waiter):
                permit.held_since = time.monotonic()
                return
        began = time.monotonic()
        with self._meter.waiting(permit.kind):
            try:
                await waiter.turn
            except asyncio.CancelledError:
                with self._lock:
                    if waiter.has_turn:
                        self._end_turn(permit, 0.0)
                    else:
                        self._queue.stop_waiting(permit.project, permit.kind, waiter)
                        self._say_load()
                raise
        permit.held_since = time.monotonic()
        permit.waited_seconds += permit.held_since - began

    def give_back(self, permit: Permit) -> None:
        with self._lock:
            self._give_back(permit)

    @contextmanager
    def waits_for_store(self, permit: Permit) -> Iterator[None]:
        began = time.monotonic()
        with self._lock:
            self._queue.goes_away(permit.project, permit.kind)
            self._deal()
        try:
            yield
        finally:
            with self._lock:
                self._queue.comes_back(permit.project, permit.kind)
                permit.away_seconds += time.monotonic() - began

    @contextmanager
    def long_poll(self, permit: Permit) -> Iterator[None]:
        """Counted apart from the calls that are let in. Raises `rate_limited`."""
        with self._counted(self._long_polls, permit, self._settings.project_long_polls):
            yield

    @contextmanager
    def stream(self, permit: Permit) -> Iterator[None]:
        """Counted apart from those, too: who looks on must not keep a job from waiting. Raises `rate_limited`."""
        with self._counted(self._streams, permit, self._settings.project_streams):
            yield

    @contextmanager
    def _counted(self, waits: _Waits, permit: Permit, most: int) -> Iterator[None]:
        project = permit.owner
        with self._lock:
            count = waits.of_project.get(project, 0)
            if count >= most:
                self._meter.count_refusal(project, permit.kind, waits.setting)
                raise ProblemError(
                    ProblemCode.RATE_LIMITED,
                    f"{count} calls of the project {project!r} {waits.what} in this process, as many as "
                    f"{waits.setting} allows. {waits.remedy}",
                    retry_after_seconds=_LONG_POLL_RETRY_SECONDS,
                )
            waits.of_project[project] = count + 1
            self._give_back(permit)
        try:
            yield
        finally:
            with self._lock:
                waits.of_project[project] -= 1
                if not waits.of_project[project]:
                    del waits.of_project[project]

    def _give_back(self, permit: Permit) -> None:
        if permit.held_since is not None:
            seconds = time.monotonic() - permit.held_since - permit.away_seconds
            permit.held_since, permit.away_seconds = None, 0.0
            self._end_turn(permit, seconds)

    def _end_turn(self, permit: Permit, seconds: float) -> None:
        self._queue.give_back(permit.project, permit.kind, seconds, time.monotonic())
        self._deal()

    def _deal(self, mine: _Waiter | None = None) -> bool:
        """Wakes those whose turn it is. Whether it is that of `mine`, which is awake."""
        now = time.monotonic()
        self._queue.is_crowded = self._interpreter.is_crowded(now)
        while (waiter := self._queue.take(now)) is not None:
            waiter.has_turn = True
            if waiter is mine:
                continue
            try:
                waiter.turn.get_loop().call_soon_threadsafe(_wake, waiter.turn)
            except RuntimeError:  # its loop has closed: no request waits there any more
                self._queue.give_back(waiter.permit.project, waiter.permit.kind, 0.0, now)
        self._say_load()
        again_at = self._queue.again_at(now)
        if again_at is not None and self._loop is not None and not self._deals_later:
            with suppress(RuntimeError):  # it has closed: nobody waits there
                self._loop.call_soon_threadsafe(self._loop.call_later, max(0.0, again_at - now), self._deal_later)
                self._deals_later = True
        return mine is not None and mine.has_turn

    def _deal_later(self) -> None:
        """On the event loop, though no call has ended."""
        with self._lock:
            self._deals_later = False
            self._deal()

    def _say_load(self) -> None:
        self._load.set_busy(busy=self._queue.training_waits)

    def _refused(self, project: str, refusal: Refusal) -> ProblemError:
        seconds = refusal.retry_after_seconds
        code, why = {
            Limit.PROJECT: (
                ProblemCode.RATE_LIMITED,
                f"Too many calls of the project {project!r} are under way in this process (HOLDFAST_PROJECT_REQUESTS).",
            ),
            Limit.PROJECT_RATE: (
                ProblemCode.RATE_LIMITED,
                f"The project {project!r} makes more than {self._settings.project_requests_per_second:g} calls a "
                "second in this process (HOLDFAST_PROJECT_REQUESTS_PER_SECOND).",
            ),
            Limit.WAIT: (
                ProblemCode.RATE_LIMITED,
                f"So many calls of the project {project!r} wait in this process that this one would be answered too "
                "late. More processes answer more at once (HOLDFAST_SERVE_WORKERS).",
            ),
            Limit.SERVICE: (
                ProblemCode.BUSY,
                "Too many calls are under way in this process (HOLDFAST_MOST_REQUESTS).",
            ),
        }[refusal.limit]
        return ProblemError(
            code, f"{why} Try again in {seconds} s.", limit=refusal.limit.value, retry_after_seconds=seconds
        )


_LONG_POLL_RETRY_SECONDS = 5
_EXCHANGES_BURST_SECONDS = 300
"""All ranks of a job begin at once, and each has a token of its own."""
_IDENTITIES_OF_A_RULE = 10
_EXCHANGES_SETTING = "HOLDFAST_IDENTITY_EXCHANGES_PER_SECOND"


def _token_refused(caller: Principal, refusal: TokenRefusal) -> ProblemError:
    seconds = refusal.retry_after_seconds
    why = {
        TokenLimit.RATE: f"makes more than {refusal.most:g} calls a second in this process",
        TokenLimit.CONCURRENT: f"has too many calls under way in this process, of {refusal.most:g} at most",
    }[refusal.limit]
    return ProblemError(
        ProblemCode.RATE_LIMITED,
        f"The token {caller.name!r} {why}: its own limit, or {refusal.limit}. Try again in {seconds} s.",
        limit=refusal.limit.value,
        retry_after_seconds=seconds,
    )


def _wake(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


class Permit:
    """One call's place among those that are worked on, taken and given back."""

    def __init__(self, admission: Admission, connection: HTTPConnection, project: str, kind: CallClass) -> None:
        self._admission = admission
        self.connection = connection
        self.counted_as: str | None = None
        """The token or the identity that this call counts for."""
        self.project = project
        self.owner = project
        self.kind = kind
        self.held_since: float | None = None
        self.away_seconds = 0.0
        """Of that time, it has waited for a store."""
        self.waited_seconds = 0.0

    def authenticated(self, caller: Principal, path: Mapping[str, str]) -> None:
        """Who it is. The call keeps its turn, but what it waits for afterwards is its own project's. Raises
        `rate_limited` if its token, which was not seen here before, or its project has used up its limits."""
        self.owner = self._admission.project_of(caller, path)
        self._admission.count_call(self, caller)

    def count_exchange(self, identity: str, rules: str) -> None:
        """Raises `rate_limited` if the identity has got as many tokens as it may. On any thread."""
        self._admission.count_exchange(self, identity, rules)

    async def take(self) -> None:
        """Waits for this call's turn; at once if it has the place already."""
        if self.held_since is None:
            await self._admission.take(self)

    def give_back(self) -> None:
        self._admission.give_back(self)

    @contextmanager
    def waits_for_store(self) -> Iterator[None]:
        """Keeps its place, which does not count for its project's share meanwhile. On any thread."""
        with self._admission.waits_for_store(self):
            yield

    @contextmanager
    def long_poll(self) -> Iterator[None]:
        """Holds no place while the block waits. Raises `rate_limited`; afterwards `take` it again."""
        with self._admission.long_poll(self):
            yield

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Likewise, while a reply is sent that goes on for long. Raises `rate_limited`."""
        with self._admission.stream(self):
            yield


class _Meter:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._waiting = Gauge(
            "holdfast_calls_waiting",
            "Calls that wait for their turn, by class.",
            ("class",),
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._waited = Histogram(
            "holdfast_call_wait_seconds",
            "How long calls waited that did not have their turn at once, by class.",
            ("class",),
            buckets=_WAIT_BUCKETS_SECONDS,
            registry=registry,
        )
        self._refused = Counter(
            "holdfast_calls_refused",
            "Calls that were refused for load, by class, by project and by the setting that limits them.",
            ("class", "project", "limit"),
            registry=registry,
        )
        self._shown: set[str] = set()

    @contextmanager
    def waiting(self, kind: CallClass) -> Iterator[None]:
        label, began = kind.name.lower(), time.monotonic()
        waiting = self._waiting.labels(label)
        waiting.inc()
        try:
            yield
        finally:
            waiting.dec()
            self._waited.labels(label).observe(time.monotonic() - began)

    def count_refusal(self, project: str, kind: CallClass, limit: str) -> None:
        """The first hundred projects have a time series of their own."""
        name = _NO_PROJECT if project.startswith(_NO_PROJECT) else project
        if len(self._shown) < _MOST_LABELS:
            self._shown.add(name)
        self._refused.labels(kind.name.lower(), name if name in self._shown else _MANY_PROJECTS, limit).inc()
