"""Servers that the tests share: each is started when the first test asks for it, once per test process."""

from __future__ import annotations

import functools
import gc
import logging
import os
import ssl
import zlib
from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import certifi
import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.support.azurite import Azurite, azurite_server
from tests.support.databases import PostgresCatalogs, SqliteCatalogs, statements_compiled_once
from tests.support.oidc_provider import OidcProvider, oidc_provider
from tests.support.pgbouncer import PgBouncer, pgbouncer
from tests.support.postgres import PostgresServer, postgres_server
from tests.support.prepare import NotHereError
from tests.support.progress import Progress
from tests.support.prometheus import promtool
from tests.support.seaweedfs import SeaweedFS, seaweedfs_server
from tests.support.threat_model import NoneSkipped
from tests.support.wakeup_fd import wakeup_fd

_TESTS = Path(__file__).parent

# The tests may run on a machine of a cloud: no request of theirs goes to its metadata server.
os.environ["HOLDFAST_PREEMPTION_CLOUD"] = "none"

# How long an example takes says how busy the machine is, so it is no matter. A gate answers the same to the same code,
# so it looks at the same examples each time; HYPOTHESIS_PROFILE=long looks at others every time, and at more of them.
_ANY_PACE = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("gate", derandomize=True, max_examples=100, stateful_step_count=40, **_ANY_PACE)
settings.register_profile("long", max_examples=600, stateful_step_count=60, **_ANY_PACE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))
    if config.getoption("--threat-model"):
        config.pluginmanager.register(NoneSkipped())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rule", help="run only the tests marked with this rule, for example commit-before-reply")
    parser.addoption(
        "--threat-model",
        action="store_true",
        help="each test that docs/threat-model.md names is in the run and not skipped",
    )
    parser.addoption(
        "--databases",
        choices=["each", "in-turn"],
        default="each",
        help="in-turn: a test that is not about the database runs on one of the two, the next test on the other",
    )


# Their tests start processes and wait for them; those of all other folders work in the test's own process.
_FOLDERS_OF_JOBS = {
    "chaos",
    "chaos_run",
    "e2e",
    "jepsen",
    "preemption",
    "soak",
    "stateful",
    "trainer",
    "upgrade",
    "web",
}


# The slow gate (`make test-slow`): files and folders whose tests need minutes of real faults, a whole framework or
# another tool's format.
_SLOW = (
    "chaos",
    "chaos_run",
    "e2e/test_api_schema.py",
    "e2e/test_bench.py",
    "e2e/test_scale.py",
    "e2e/test_demo.py",
    "e2e/test_elastic.py",
    "e2e/test_examples.py",
    "e2e/test_import.py",
    "e2e/test_pull.py",
    "e2e/test_run.py",
    "e2e/test_slurm.py",
    "e2e/test_verify_resume.py",
    "fuzz",
    "jepsen",
    "preemption",
    "soak",
    "stateful",
    "trainer/test_hf.py",
    "trainer/test_leftovers.py",
    "trainer/test_lightning.py",
    "trainer/test_lightning_resumes.py",
    "trainer/test_second_store.py",
    "trainer/test_torchtitan.py",
    "upgrade/test_litestream.py",
    "upgrade/test_postgres_recovery.py",
    "upgrade/test_two_versions.py",
    "upgrade/test_upgrade_figures.py",
    "web",
)

# Each test of the service runs on SQLite and on Postgres. In the fast gate Postgres runs what is about locks, races,
# leases or the dialect: these files, the tests elsewhere that are marked `races`, and those that have no other
# database. The slow gate has the rest. Both gates in one run take the rest in turn: see _left_to_the_other_database.
_ABOUT_THE_DATABASE = (
    "_races",
    "beside_",
    "test_abandoned_uploads",
    "test_collectors",
    "test_commit_records",
    "test_controllers",
    "test_dashboard_",
    "test_database_",
    "test_health",
    "test_operations",
    "test_protocol_attempts",
    "test_protocol_chunks",
    "test_protocol_waiting",
    "test_repeats",
    "test_start",
    "test_values_that_cannot_be_kept",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The fast gate does not even import the slow files: each test process would load every framework."""
    return True if config.option.markexpr == "not slow" and _all_of_it_is_slow(collection_path) else None


@functools.cache
def _all_of_it_is_slow(path: Path) -> bool:
    return any(path.is_relative_to(_TESTS / each) for each in _SLOW)


def _is_slow(item: pytest.Item) -> bool:
    return _all_of_it_is_slow(item.path) or (_database(item) == "postgres" and not _is_about_the_database(item))


def _database(item: pytest.Item) -> str | None:
    """Of a test of the service."""
    if item.path.relative_to(_TESTS).parts[0] != "service":
        return None
    return getattr(getattr(item, "callspec", None), "params", {}).get("database_url")


def _is_about_the_database(item: pytest.Item) -> bool:
    if item.get_closest_marker("races") is not None or _has_no_other_database(item):
        return True
    return any(each in item.path.stem for each in _ABOUT_THE_DATABASE)


def _has_no_other_database(item: pytest.Item) -> bool:
    parametrized = [mark.args for mark in item.iter_markers("parametrize")]
    return any(names == "database_url" and len(list(values)) == 1 for names, values, *_ in parametrized)


def pytest_itemcollected(item: pytest.Item) -> None:
    if _is_slow(item):
        item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = _mixed(items)
    rule = config.getoption("--rule")
    if rule is not None:
        _leave_out(config, items, lambda item: all(rule not in mark.args for mark in item.iter_markers("rule")))
    if config.getoption("--databases") == "in-turn":
        there = {item.nodeid for item in items}
        _leave_out(config, items, lambda item: _left_to_the_other_database(item, there))


def _leave_out(config: pytest.Config, items: list[pytest.Item], is_out: Callable[[pytest.Item], bool]) -> None:
    out = {item for item in items if is_out(item)}
    config.hook.pytest_deselected(items=list(out))
    items[:] = [item for item in items if item not in out]


def _left_to_the_other_database(item: pytest.Item, there: set[str]) -> bool:
    """By the digest of its name, so that it is the same one each time. A statement of the product is part of many
    tests: both databases see it. A test that exists for one database alone always runs."""
    database = _database(item)
    if database not in ("sqlite", "postgres") or _is_about_the_database(item):
        return False
    name, _, parameters = item.nodeid.partition("[")
    other = parameters.replace(database, "postgres" if database == "sqlite" else "sqlite")
    if f"{name}[{other}" not in there:
        return False
    turn = zlib.crc32(item.nodeid.replace(database, "").encode()) % 2
    return database == ("sqlite", "postgres")[turn]


def pytest_collection_finish() -> None:
    # torch and 5,000 tests stay to the end: to look through them for garbage takes a tenth of the time of the tests.
    gc.collect()
    gc.freeze()


def _mixed(items: list[pytest.Item]) -> list[pytest.Item]:
    """A file that waits for jobs, then one that does not, and so on: the cores are busy all the time, and no long file
    begins when all others are done."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = [path for path in files if path.relative_to(_TESTS).parts[0] in _FOLDERS_OF_JOBS]
    working = [path for path in files if path not in waiting]
    turns = chain.from_iterable(zip_longest(waiting, working))
    return [item for path in turns if path is not None for item in files[path]]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def pooler(postgres: PostgresServer) -> Iterator[PgBouncer]:
    """In front of `postgres`, in transaction mode. Skips only where there is neither PgBouncer nor apt."""
    try:
        # Fewer connections than the tests have threads: transactions of one client meet those of others.
        with pgbouncer(postgres.url_for("postgres"), server_connections=3) as server:
            yield server
    except NotHereError as reason:
        # pip cannot install PgBouncer, and no other part of Holdfast needs it.
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def prometheus_tools() -> None:
    """promtool and Prometheus can be run. Skips only where there is neither Prometheus nor apt."""
    try:
        promtool("--version")
    except NotHereError as reason:
        # pip cannot install Prometheus, and no other part of Holdfast needs it.
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[SeaweedFS]:
    with seaweedfs_server() as server:
        yield server


@pytest.fixture(scope="session")
def azurite() -> Iterator[Azurite]:
    """Skips only where there is no Node.js."""
    try:
        with azurite_server() as server:
            yield server
    except NotHereError as reason:
        # pip cannot install Node.js, and no other part of Holdfast needs it.
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def oidc() -> Iterator[OidcProvider]:
    """Skips only where there is no Node.js. A test that stops it, or wants other lifetimes, makes its own."""
    try:
        with oidc_provider() as server:
            yield server
    except NotHereError as reason:
        # pip cannot install Node.js, and no other part of Holdfast needs it.
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def postgres_catalogs(postgres: PostgresServer) -> Iterator[PostgresCatalogs]:
    catalogs = PostgresCatalogs(postgres)
    yield catalogs
    catalogs.drop()


@pytest.fixture(scope="session")
def sqlite_catalogs(tmp_path_factory: pytest.TempPathFactory) -> SqliteCatalogs:
    return SqliteCatalogs(tmp_path_factory.mktemp("sqlite"))


@pytest.fixture(scope="session", autouse=True)
def _certificates_read_once() -> Iterator[None]:
    """Every HTTP client reads certifi's file of certificates, 25 ms each; here thousands are made for plain http. A
    context of another file is made anew: a test or a client may change it, and all would share that change."""
    read = ssl.create_default_context
    read_once = functools.cache(read)
    plain = {"cafile": certifi.where()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", lambda *to, **of: (read_once if of == plain else read)(*to, **of))
        yield


@pytest.fixture(scope="session", autouse=True)
def _statements_compiled_once() -> Iterator[None]:
    with statements_compiled_once():
        yield


@pytest.fixture(scope="session", autouse=True)
def _plain_log() -> Iterator[None]:
    """What structlog does by itself is made for a terminal, and takes seconds for one traceback."""
    configure = structlog.configure

    def without_memory(**settings: Any) -> None:
        """A logger that was used under one test's configuration would keep it for every later test."""
        configure(**settings | {"cache_logger_on_first_use": False})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structlog, "configure", without_memory)
        structlog.configure(
            processors=[
                structlog.contextvars.merge_contextvars,
                structlog.processors.add_log_level,
                structlog.processors.format_exc_info,
                structlog.processors.KeyValueRenderer(key_order=["level", "event"]),
            ],
            logger_factory=structlog.stdlib.LoggerFactory(),
        )
        yield


@pytest.fixture(scope="module", autouse=True)
def _signals_as_they_were() -> Iterator[None]:
    """A Checkpointer that a test leaves open would take the signals of every later test of this process."""
    before = wakeup_fd()
    yield
    assert wakeup_fd() == before, "a test of this file left a Checkpointer open, or closed it on another thread"


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that sets up logging inside a test would write into that test's closed streams for ever after."""
    root = logging.getLogger()
    handlers, level, configuration = root.handlers[:], root.level, structlog.get_config()
    named = {name: logging.getLogger(name) for name in ("uvicorn.access", "botocore", "urllib3", "alembic")}
    as_they_were = {name: (logger.level, logger.disabled) for name, logger in named.items()}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, logger in named.items():
        logger.setLevel(as_they_were[name][0])
        logger.disabled = as_they_were[name][1]
    structlog.configure(**configuration)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the developer's shell has set must not decide a test."""
    for name in list(os.environ):
        if name.startswith("HOLDFAST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOLDFAST_PREEMPTION_CLOUD", "none")
