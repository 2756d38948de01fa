"""kill -9 of the service and of Postgres in the middle of a save, a full disk, an unavailable store: training goes on,
and whatever was called committed can be restored."""

from __future__ import annotations

import resource
import secrets
from collections.abc import Iterator

import pytest
import torch

import holdfast
from holdfast import errors
from tests.chaos.conftest import RestartableService, uploading_steps
from tests.support.postgres import PostgresServer, postgres_server
from tests.support.seaweedfs import SeaweedFS, seaweedfs_server

pytestmark = pytest.mark.timeout(600)

ELEMENTS = 24_000_000
"""About 100 MB: long enough under way to be cut off in the middle."""


def state_at(step):
    return {"big": {"tensor": torch.full((ELEMENTS,), float(step)) + torch.arange(ELEMENTS)}}


def wait_until_uploading(client, run, handle, step):
    while not handle.committed.done():
        if step in uploading_steps(client, run):
            return
    raise AssertionError(f"the save was over before it could be cut off: {handle.committed.exception()}")


def assert_restores(run, step):
    state = {"big": {"tensor": torch.zeros(ELEMENTS)}}
    with holdfast.Checkpointer(run) as ckpt:
        assert ckpt.restore(state) == step + 1
    assert torch.equal(state["big"]["tensor"], state_at(step)["big"]["tensor"])


def cut_off_in_mid_save(client, run, kill, revive):
    """A save during which a server dies and comes back; then one more. The last committed step."""
    with holdfast.Checkpointer(f"tests/{run}", create=True) as ckpt:
        ckpt.restore(state_at(0))
        ckpt.save(0, state_at(0)).committed.result(timeout=120)
        handle = ckpt.save(1, state_at(1))
        wait_until_uploading(client, run, handle, 1)
        kill()
        revive()
        outcome = handle.committed.exception(timeout=240)
        assert outcome is None or isinstance(outcome, errors.SaveFailed)
        offered = client.restores.restore_point("tests", run).restore_point.step
        assert offered == (1 if outcome is None else 0), "what the handle said is what the catalog says"
        ckpt.save(2, state_at(2)).committed.result(timeout=240)
    assert_restores(f"tests/{run}", 2)
    return outcome


def test_a_service_killed_in_mid_save_and_started_again_loses_nothing(client, service: RestartableService):
    assert cut_off_in_mid_save(client, "service", service.kill9, service.start) is None


def test_a_service_restarted_in_mid_save_loses_nothing(client, service: RestartableService):
    assert cut_off_in_mid_save(client, "restart", service.stop, service.start) is None


class TestPostgres:
    @pytest.fixture
    def postgres(self) -> Iterator[PostgresServer]:
        with postgres_server(own=True) as server:
            yield server

    @pytest.fixture
    def service_settings(self, postgres: PostgresServer) -> dict[str, str]:
        # The shared test server acknowledges commits that it has not written yet, which no real one may be set to.
        url = postgres.create_database(f"chaos_{secrets.token_hex(4)}")
        return {"HOLDFAST_DATABASE_URL": url + ("&" if "?" in url else "?") + "options=-csynchronous_commit%3Don"}

    def test_a_database_killed_in_mid_save_and_started_again_loses_nothing(self, client, postgres: PostgresServer):
        assert cut_off_in_mid_save(client, "database", postgres.kill9, postgres.restart) is None


class TestSeaweedFS:
    @pytest.fixture
    def weed(self) -> Iterator[SeaweedFS]:
        with seaweedfs_server() as server:
            yield server

    @pytest.fixture
    def service_settings(self, weed: SeaweedFS) -> dict[str, str]:
        return {"HOLDFAST_STORE": weed.store_url, **weed.environment}

    def test_a_store_that_is_unavailable_costs_one_save_and_not_the_training(
        self, client, weed: SeaweedFS, monkeypatch: pytest.MonkeyPatch
    ):
        # The outage lasts longer, and what a busy machine has trouble with before and after it does not.
        monkeypatch.setenv("HOLDFAST_SAVE_RETRY_SECONDS", "15")
        with holdfast.Checkpointer("tests/away", create=True) as ckpt:
            ckpt.restore(state_at(0))
            ckpt.save(0, state_at(0)).committed.result(timeout=120)
            weed.stop()
            failed = ckpt.save(1, state_at(1)).committed.exception(timeout=240)
            assert isinstance(failed, errors.SaveFailed)
            weed.start()
            ckpt.save(2, state_at(2)).committed.result(timeout=240)
        assert_restores("tests/away", 2)


def test_a_full_disk_fails_the_save_says_so_and_the_next_one_goes_on(client, service: RestartableService):
    with holdfast.Checkpointer("tests/full", create=True) as ckpt:
        ckpt.restore(state_at(0))
        ckpt.save(0, state_at(0)).committed.result(timeout=120)
        unlimited = resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (16_000_000, resource.RLIM_INFINITY))
        failed = ckpt.save(1, state_at(1)).committed.exception(timeout=120)
        assert isinstance(failed.__cause__, errors.StoreFull)
        assert "Free space in the store" in str(failed)
        resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, unlimited)
        ckpt.save(2, state_at(2)).committed.result(timeout=120)
    assert client.restores.restore_point("tests", "full").restore_point.step == 2
    assert_restores("tests/full", 2)
