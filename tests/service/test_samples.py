"""A sample object shows the way to the store, and nothing of it stays (holdfast_protocol.stores)."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from pathlib import Path

import pytest

from holdfast_client import Client, ClientSettings, errors
from holdfast_client.chunks.transfer import put_chunk, write_incoming
from holdfast_client.cli.doctor import round_trip
from holdfast_protocol.states import Scope
from holdfast_protocol.stores import MakeSample
from tests.support.service import RunningService

BODY = b"a sample"
REQUEST = MakeSample(digest=hashlib.sha256(BODY).hexdigest(), bytes=len(BODY))


@pytest.fixture(params=["sqlite"])
def database_url(request, tmp_path):
    return request.getfixturevalue("sqlite_catalogs").new(tmp_path)


def connected(service: RunningService, *scopes: Scope) -> Client:
    return Client(ClientSettings(url=service.url, token=service.token(*scopes), retry_seconds=0))


def left(service: RunningService) -> list[str]:
    return [each.key.digest for each in service.context.store.list_objects("samples")]


def test_a_round_trip_leaves_no_object_and_no_row(service):
    with connected(service, Scope.TRAIN) as client:
        assert "went to the store and back" in round_trip(client)
    assert left(service) == []


def test_a_mount_is_said_to_be_used_once_a_file_was_written_and_read_there(service, monkeypatch):
    written = []

    def write(path, *rest):
        written.append(path)
        write_incoming(path, *rest)

    def refuse(*arguments):
        raise errors.DirectFileRefused("The store's filesystem cannot be written from here (EROFS)")

    with connected(service, Scope.TRAIN) as client:
        monkeypatch.setattr("holdfast_client.chunks.transfer.write_incoming", write)
        assert "sees the store's mount, and reads and writes there" in round_trip(client)
        (path,) = written
        assert list(Path(path).parent.iterdir()) == []
        monkeypatch.setattr("holdfast_client.chunks.transfer.write_incoming", refuse)
        assert round_trip(client).endswith(
            "jobs do not use it: The store's filesystem cannot be written from here (EROFS)"
        )


def test_a_round_trip_to_s3_is_hashed_by_the_store(s3_service):
    with connected(s3_service, Scope.TRAIN) as client:
        round_trip(client)
    assert left(s3_service) == []


def test_what_a_killed_doctor_left_goes_with_the_next_sample(service, monkeypatch):
    with connected(service, Scope.TRAIN) as client:
        offer = client.samples.create(REQUEST)
        put_chunk(offer.ticket, memoryview(BODY), client.transfers)
        client.samples.create(REQUEST)
        assert left(service) == [REQUEST.digest], "it may still be under way"
        later = service.context.store.clock() + timedelta(hours=2)
        monkeypatch.setattr(service.context.store, "clock", lambda: later)
        client.samples.create(REQUEST)
    assert left(service) == []


def test_a_sample_that_has_not_arrived_is_said_to_be_missing(service):
    with connected(service, Scope.TRAIN) as client:
        offer = client.samples.create(REQUEST)
        with pytest.raises(errors.ChunkGone):
            client.samples.check(offer.id)
        client.samples.delete(offer.id)
        client.samples.delete(offer.id)


@pytest.mark.parametrize("sample", ["x", "../../demo", f"{'0' * 64}-..", f"{'0' * 64}/{'0' * 32}"])
def test_no_other_object_can_be_named(service, sample):
    with connected(service, Scope.TRAIN) as client:
        for call in (client.samples.check, client.samples.delete):
            with pytest.raises((errors.InvalidRequest, errors.RouteNotFound)):
                call(sample)


def test_a_reader_makes_no_sample(service):
    with connected(service, Scope.READ) as client, pytest.raises(errors.Forbidden):
        client.samples.create(REQUEST)


@pytest.mark.rule("limits-before-work")
def test_samples_are_no_way_around_a_quota(service, monkeypatch):
    monkeypatch.setattr("holdfast_service.attached_stores.samples.MOST_OF_A_PROJECT", 2)
    with connected(service, Scope.TRAIN) as one, connected(service, Scope.TRAIN) as other:
        one.samples.create(REQUEST)
        one.samples.create(REQUEST)
        with pytest.raises(errors.RateLimited):
            one.samples.create(REQUEST)
        other.samples.create(REQUEST)
