"""`make rehearse`: a failover of Postgres to its synchronous standby, with jobs that save all the time.

python -m scripts.rehearse_failover [--jobs 4] [--commits 10]

It starts a primary, a standby that each commit waits for, a service with the addresses of both, and jobs. When each job
has committed so often, the primary gets SIGKILL, and the standby is promoted as docs/operating/disaster.md says. When
each job has committed so often again, every commit that a job was told of must be in the promoted database, with all of
its rows. The exit code is 1 if one is missing. All of it is on this machine, on loopback, and gone afterwards.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import httpx
from sqlalchemy import make_url
from tests.support.ports import free_ports
from tests.support.postgres import OwnPostgresServer, postgres_server
from tests.support.processes import ServerProcess
from tests.support.rank import Job, Refused, answer
from tests.support.serve import HOLDFAST, is_ready, without_holdfast_settings

from holdfast_protocol.base import PROTOCOL_HEADER, PROTOCOL_VERSION

_WITHIN_SECONDS = 300.0
_RETRY_SECONDS = 0.2


@dataclass
class Saver:
    """One job. `told`: the commits that it was told of, by step."""

    http: httpx.Client
    run: str
    told: dict[int, str] = field(default_factory=dict)
    told_at: list[float] = field(default_factory=list)
    failed_calls: int = 0
    error: BaseException | None = None

    def save_until(self, stop: threading.Event) -> None:
        try:
            job = Job(self.http, self.run, create=True)
            step = 0
            while not stop.is_set():
                step += 1
                try:
                    saved = job.save(step)
                    if saved["state"] == "committed":
                        self.told_at.append(time.monotonic())
                        self.told[step] = saved["id"]
                except (httpx.HTTPError, Refused) as error:
                    if isinstance(error, Refused) and error.status < 500:
                        raise
                    self.failed_calls += 1
                    stop.wait(_RETRY_SECONDS)
        except BaseException as error:
            self.error = error


class Moments(NamedTuple):
    began: float
    killed: float
    """The primary."""
    resumed: float
    """The first commit after the promotion."""
    ended: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--commits", type=int, default=10, help="of each job, before the failover and after it")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-rehearsal-")))
        primary = stack.enter_context(postgres_server(own=True))
        assert isinstance(primary, OwnPostgresServer)
        standby_port = _synchronous_standby(primary, stack)
        database = f"holdfast_{secrets.token_hex(6)}"
        both = _url_of_both(primary.create_database(database), standby_port)
        http = _service(folder, both, stack)
        savers = [Saver(http(), f"rehearsal/job-{number}") for number in range(1, arguments.jobs + 1)]
        moments = _rehearse(primary, standby_port, savers, arguments.commits)
        told = [each for saver in savers for each in saver.told.values()]
        lost = _lost(http(), told)
    told_at = [at for saver in savers for at in saver.told_at]
    before, during, after = (_rate(told_at, *span) for span in pairwise(moments))
    print(f"commits that jobs were told of    {len(told)}")
    print(f"calls that failed and were retried {sum(each.failed_calls for each in savers)}")
    print(f"from the kill to the first commit {moments.resumed - moments.killed:.1f} s")
    print(f"saves a second                    {before:.1f} before, {during:.1f} until that commit, {after:.1f} after")
    print(f"lost                              {len(lost)}")
    for each in lost:
        print(f"  {each}")
    return 1 if lost else 0


def _synchronous_standby(primary: OwnPostgresServer, stack: ExitStack) -> int:
    """Its port, when the primary waits for it. The base backup comes first: a standby that is promoted must not wait
    for one of its own."""
    port = free_ports()
    primary.base_backup("standby", "-R")
    stack.callback(primary.start_other("standby", port).stop)
    with primary.connect() as connection:
        connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'FIRST 1 (*)'")
        connection.execute("SELECT pg_reload_conf()")

        def is_synchronous() -> bool:
            found = connection.execute("SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'").fetchone()
            return found == (1,)

        _wait(is_synchronous, "the standby follows")
    return port


def _url_of_both(primary_url: str, standby_port: int) -> str:
    """As docs/operating/set-up.md has it: the address that takes writes is the right one."""
    url = make_url(primary_url)
    hosts = (f"{url.host}:{url.port}", f"{url.host}:{standby_port}")
    both = url.set(host=None, port=None, query={"host": hosts, "target_session_attrs": "read-write"})
    return both.set(drivername="postgresql").render_as_string(hide_password=False)


def _service(folder: Path, database_url: str, stack: ExitStack) -> Callable[[], httpx.Client]:
    port, token = free_ports(), f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}"
    url = f"http://127.0.0.1:{port}"
    settings = {
        "HOLDFAST_DATABASE_URL": database_url,
        "HOLDFAST_STORE": f"posix://{folder / 'store'}",
        "HOLDFAST_DATA_DIR": str(folder / "data"),
        "HOLDFAST_BOOTSTRAP_TOKEN": token,
        "HOLDFAST_PORT": str(port),
    }
    service = ServerProcess(
        [HOLDFAST, "serve"],
        log=folder / "service.log",
        ready=lambda: is_ready(url),
        env=without_holdfast_settings() | settings,
    )
    stack.callback(service.stop)
    headers = {"Authorization": f"Bearer {token}", PROTOCOL_HEADER: PROTOCOL_VERSION}
    return lambda: stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=60))


def _rate(told_at: list[float], begin: float, end: float) -> float:
    """Commits a second."""
    return sum(begin <= at < end for at in told_at) / (end - begin)


def _rehearse(primary: OwnPostgresServer, standby_port: int, savers: list[Saver], commits: int) -> Moments:
    stop = threading.Event()
    threads = [threading.Thread(target=each.save_until, args=(stop,)) for each in savers]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    try:
        _wait(lambda: _have_committed(savers, [0] * len(savers), commits), "each job has committed")
        print("each job has committed; the primary is killed", flush=True)
        primary.kill9()
        killed_at = time.monotonic()
        with primary.connect(standby_port) as connection:
            connection.execute("SELECT pg_promote(true, 120)")
        print("the standby is promoted", flush=True)
        # A reply may have been under way when the primary died: what counts comes after the promotion.
        before = [len(each.told) for each in savers]
        _wait(lambda: any(len(each.told) > count for each, count in zip(savers, before, strict=True)), "one commits")
        resumed_at = min(at for each, count in zip(savers, before, strict=True) for at in each.told_at[count:][:1])
        _wait(lambda: _have_committed(savers, before, commits), "each job has committed again")
        ended_at = time.monotonic()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return Moments(began, killed_at, resumed_at, ended_at)


def _have_committed(savers: list[Saver], before: list[int], commits: int) -> bool:
    for each in savers:
        if each.error is not None:
            raise each.error
    return all(len(each.told) >= count + commits for each, count in zip(savers, before, strict=True))


def _lost(http: httpx.Client, told: list[str]) -> list[str]:
    """Each is asked for by name, with its manifest."""
    lost = []
    for each in told:
        try:
            found = answer(http.get(f"/v1/checkpoints/{each}/manifest"))["checkpoint"]
        except Refused as error:
            lost.append(f"{each}: {error}")
            continue
        if found["state"] != "committed":
            lost.append(f"{each}: {found['state']}")
    return lost


def _wait(condition: Callable[[], bool], what: str) -> None:
    ends_at = time.monotonic() + _WITHIN_SECONDS
    while not condition():
        if time.monotonic() > ends_at:
            raise TimeoutError(f"not within {_WITHIN_SECONDS:g} s: {what}")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
