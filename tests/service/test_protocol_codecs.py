"""Chunks that are stored encoded: what is negotiated, what the store enforces, what proves them (rule
reuse-only-hashed)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from sqlalchemy import func, select

import holdfast_service.scrub.verify
from holdfast_protocol.base import PROTOCOL_HEADER, PROTOCOL_VERSION
from holdfast_protocol.codecs import Codec, encode
from holdfast_service.copies.predicates import object_key
from holdfast_service.db.tables.core import Checkpoint, Chunk, Copy, ShardChunk
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.posix.posix_store import PosixStore
from tests.support.interleave import refused
from tests.support.rank import Job, Save, answer, digest_of, redeem
from tests.support.seaweedfs import SeaweedFS
from tests.support.service import RunningService, running_service

RAW = bytes(range(256)) * 400
"""100 KiB that shrink a lot."""


def encoded(raw: bytes = RAW, codec: Codec = Codec.ZSTD_SHUFFLE4) -> bytes:
    stored = encode(memoryview(raw), codec, most_bytes=len(raw))
    assert stored is not None
    return bytes(stored)


STORED = encoded()


def offer(raw: bytes = RAW, stored: bytes = STORED, codec: str = "zstd-shuffle4", **changes: Any) -> dict[str, Any]:
    as_it_should_be = {
        "digest": digest_of(raw),
        "bytes": len(raw),
        "codec": codec,
        "stored_digest": digest_of(stored),
        "stored_bytes": len(stored),
    }
    return as_it_should_be | changes


def asking(raw: bytes = RAW) -> dict[str, Any]:
    return {"digest": digest_of(raw), "bytes": len(raw), "ask": True}


def negotiate(save: Save, *offers: dict[str, Any], rank: int = 0, finished: tuple[bytes, ...] = ()) -> Any:
    return save.job.call(
        "POST",
        f"/v1/checkpoints/{save.id}/shards/{rank}/chunks",
        chunks=list(offers),
        finished=[digest_of(raw) for raw in finished],
    )


def upload(save: Save, raw: bytes = RAW, stored: bytes = STORED, codec: str = "zstd-shuffle4") -> str:
    """Offers, sends and reports one encoded chunk; what the service says of it."""
    (given,) = negotiate(save, offer(raw, stored, codec))["chunks"]
    save.put(stored, given["ticket"]).raise_for_status()
    return str(negotiate(save, finished=(raw,))["finished"][0]["state"])


def status(save: Save, *offers: dict[str, Any]) -> list[str]:
    return [each["status"] for each in negotiate(save, *offers)["chunks"]]


def copies_of(service: RunningService, raw: bytes = RAW) -> list[Copy]:
    with service.context.database.read() as session:
        query = select(Copy).join(Chunk).where(Chunk.digest == digest_of(raw)).order_by(Copy.id)
        return list(session.scalars(query))


def forms(service: RunningService, raw: bytes = RAW) -> list[tuple[str, str | None, str]]:
    return [(copy.state, copy.proof, copy.codec) for copy in copies_of(service, raw)]


def commit(save: Save, raw: bytes = RAW) -> dict[str, Any]:
    """With the encoded chunk and a small raw index."""
    save.upload(0, [b"index"])
    view: dict[str, Any] = save.seal(0, [raw, b"index"])
    assert view["state"] == "committed"
    return view


@pytest.fixture
def job(service: RunningService) -> Job:
    return Job(service.http())


@pytest.fixture(params=["posix", "s3"])
def any_service(
    request: pytest.FixtureRequest, settings: ServiceSettings, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningService]:
    if request.param == "s3":
        for name, value in seaweedfs.environment.items():
            monkeypatch.setenv(name, value)
        store = seaweedfs.store_url_for(f"test-{secrets.token_hex(6)}")
        settings = settings.model_copy(update={"store": store})
    with running_service(settings) as running:
        yield running


@pytest.mark.rule("reuse-only-hashed")
def test_offers_that_contradict_themselves_are_refused(service: RunningService, job: Job) -> None:
    save = job.begin(1)
    wrong: list[list[dict[str, Any]]] = [
        [offer(stored_digest=None)],
        [offer(stored_bytes=None)],
        [offer(stored_bytes=len(RAW))],
        [offer(stored_bytes=0)],
        [offer(codec="raw")],
        [offer(codec="lz4")],
        [offer(ask=True)],
        [asking() | {"md5": "0" * 32}],
        [offer(), asking()],
        [offer(), offer(codec="zstd")],
    ]
    for offers in wrong:
        with refused("invalid_request"):
            negotiate(save, *offers)
    with service.context.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Chunk)) == 0, "something was reserved all the same"
    assert status(save, offer(), offer()) == ["upload", "upload"]


def test_asking_reserves_nothing_and_orders_nothing(service: RunningService, job: Job) -> None:
    service.make_project("demo", quota_bytes=1)
    save = job.begin(1)
    for _ in range(2):
        assert negotiate(save, asking())["chunks"] == [{"digest": digest_of(RAW), "status": "absent", "ticket": None}]
    with service.context.database.read() as session:
        for table in (Chunk, Copy, ShardChunk):
            assert session.scalar(select(func.count()).select_from(table)) == 0
    with refused("chunk_not_negotiated"):
        save.seal(0, [RAW])


@pytest.mark.rule("present-is-referenced")
def test_what_is_asked_for_and_present_comes_with_its_reference(service: RunningService, job: Job) -> None:
    job.save(1, content=RAW)
    save = job.begin(2)
    assert status(save, asking(), asking(b"something else")) == ["present", "absent"]
    with service.context.database.read() as session:
        held = session.scalars(select(Chunk.digest).join(ShardChunk, ShardChunk.chunk_id == Chunk.id)).all()
    assert held == [digest_of(RAW)]
    assert commit(save)["uploaded_bytes"] == len(b"index")


def test_asking_with_another_size_finds_nothing(job: Job) -> None:
    job.save(1, content=RAW)
    (given,) = negotiate(job.begin(2), asking() | {"bytes": 5})["chunks"]
    assert given["status"] == "absent"


@pytest.mark.rule("reuse-only-hashed")
def test_the_store_takes_exactly_the_encoded_bytes(any_service: RunningService) -> None:
    save = Job(any_service.http()).begin(1)
    (given,) = negotiate(save, offer())["chunks"]
    length = next(value for name, value in given["ticket"]["headers"].items() if name.lower() == "content-length")
    assert int(length) == len(STORED)
    for wrong in (RAW[: len(STORED)], bytes(len(STORED)), STORED[:-1] + bytes([STORED[-1] ^ 1])):
        assert save.put(wrong, given["ticket"]).status_code >= 400
    assert negotiate(save, finished=(RAW,))["finished"][0]["state"] == "missing"
    assert save.put(STORED, given["ticket"]).is_success
    assert negotiate(save, finished=(RAW,))["finished"][0]["state"] == "verified"


@pytest.mark.rule("reuse-only-hashed")
def test_a_store_s_checksum_of_encoded_bytes_proves_no_chunk(any_service: RunningService) -> None:
    save = Job(any_service.http(), "demo/first").begin(1)
    assert upload(save) == "verified"
    assert forms(any_service) == [("verified", "unproven", "zstd-shuffle4")]
    commit(save)
    again = Job(any_service.http(), "demo/first", after=1).begin(2)
    assert status(again, asking(), asking(b"index")) == ["absent", "present"]
    assert holdfast_service.scrub.verify.reconcile(any_service.context).good == 1
    assert forms(any_service) == [("verified", "read", "zstd-shuffle4")]
    other = Job(any_service.http(), "demo/other").begin(1)
    assert status(other, asking()) == ["present"]
    assert status(other, offer()) == ["present"]
    assert status(other, {"digest": digest_of(RAW), "bytes": len(RAW)}) == ["present"]


def test_its_own_attempt_relies_on_an_encoded_copy_at_once(job: Job) -> None:
    upload(job.begin(1))
    assert status(job.begin(2), asking()) == ["present"]


LIES = {
    "another chunk": lambda: encoded(b"\xff" + RAW[1:]),
    "a shorter chunk": lambda: encoded(RAW[:-1]),
    "a longer chunk": lambda: encoded(RAW + b"x"),
    "no frame": lambda: bytes(3000),
    "half a frame": lambda: STORED[: len(STORED) // 2],
    "a bomb": lambda: zstandard.ZstdCompressor().compress(bytes(2**29)),
}


@pytest.mark.rule("reuse-only-hashed")
@pytest.mark.parametrize("lie", LIES)
def test_what_does_not_decode_to_the_chunk_spoils_its_own_checkpoint_and_no_other(
    service: RunningService, job: Job, lie: str
) -> None:
    stored = LIES[lie]()
    save = job.begin(1)
    assert upload(save, stored=stored) == "verified", "the store has just the bytes that were announced"
    commit(save)
    later = Job(service.http(), after=1).begin(2)
    assert status(later, asking()) == ["absent"]
    found = holdfast_service.scrub.verify.reconcile(service.context)
    assert (found.bad, found.corrupt_checkpoints) == (1, (save.id,))
    assert found.read_bytes <= len(stored) + len(b"index")
    assert [state for state, _, _ in forms(service)] == ["bad"]
    with service.context.database.read() as session:
        assert session.get_one(Checkpoint, save.id).health == "corrupt"
    # The same digest, sent as it should be, repairs it: in a copy of its own.
    assert upload(later) == "verified"
    commit(later)


@pytest.mark.rule("reuse-only-hashed")
@pytest.mark.rule("random-generation")
def test_another_codec_gets_a_copy_of_its_own(service: RunningService, job: Job) -> None:
    save = job.begin(1)
    raw = {"digest": digest_of(RAW), "bytes": len(RAW)}
    plain = encoded(codec=Codec.ZSTD)
    (first,) = negotiate(save, raw)["chunks"]
    (second,) = negotiate(save, offer())["chunks"]
    (third,) = negotiate(save, offer(stored=plain, codec="zstd"))["chunks"]
    assert status(save, offer(stored=plain, codec="zstd")) == ["upload"]
    generations = [copy.generation for copy in copies_of(service)]
    assert len(set(generations)) == 3
    # What counts is the last one; the late arrival of another is no answer to it.
    save.put(RAW, first["ticket"]).raise_for_status()
    save.put(STORED, second["ticket"]).raise_for_status()
    assert negotiate(save, finished=(RAW,))["finished"][0]["state"] == "missing"
    save.put(plain, third["ticket"]).raise_for_status()
    assert negotiate(save, finished=(RAW,))["finished"][0]["state"] == "verified"
    assert commit(save)["uploaded_bytes"] == len(plain) + len(b"index")


@pytest.mark.rule("present-is-referenced")
def test_a_chunk_that_is_there_raw_is_not_sent_encoded(service: RunningService, job: Job) -> None:
    job.save(1, content=RAW)
    later = Job(service.http(), after=1).begin(2)
    assert status(later, offer()) == ["present"]
    assert [codec for _, _, codec in forms(service)] == ["raw"]


@pytest.mark.rule("quota-reserved")
def test_the_quota_counts_what_is_stored(service: RunningService) -> None:
    service.make_project("demo", quota_bytes=len(STORED))
    save = Job(service.http()).begin(1)
    with refused("quota_exceeded"):
        negotiate(save, {"digest": digest_of(RAW), "bytes": len(RAW)})
    assert upload(save) == "verified"
    with refused("quota_exceeded"):
        negotiate(save, {"digest": digest_of(b"one byte more"), "bytes": 1})


def reads(service: RunningService, checkpoint_id: str, *, protocol: str = PROTOCOL_VERSION, **body: Any) -> Any:
    http = service.http(headers=[(PROTOCOL_HEADER, protocol)])
    return answer(http.post(f"/v1/checkpoints/{checkpoint_id}/reads", json={"digests": [digest_of(RAW)]} | body))


def test_a_ticket_to_read_says_how_the_bytes_are_encoded(any_service: RunningService) -> None:
    save = Job(any_service.http()).begin(1)
    upload(save)
    commit(save)
    (ticket,) = reads(any_service, save.id)["chunks"]
    assert (ticket["codec"], ticket["bytes"], ticket["stored_bytes"]) == ("zstd-shuffle4", len(RAW), len(STORED))
    assert redeem(any_service.http(), ticket).content == STORED


def test_a_path_to_read_says_how_its_bytes_are_encoded(service: RunningService, job: Job) -> None:
    save = job.begin(1)
    upload(save)
    commit(save)
    mount = answer(service.http().post("/v1/mount-proofs"))
    proof = {"proof_id": mount["proof_id"], "content": Path(mount["path"]).read_text()}
    (ticket,) = reads(service, save.id, mount_proof=proof)["chunks"]
    assert (ticket["kind"], ticket["codec"]) == ("file", "zstd-shuffle4")
    assert Path(ticket["path"]).read_bytes() == STORED


@pytest.mark.rule("protocol-version")
def test_a_client_that_cannot_decode_it_is_refused_with_both_numbers(service: RunningService, job: Job) -> None:
    save = job.begin(1)
    upload(save)
    commit(save)
    with refused("unsupported_protocol") as caught:
        reads(service, save.id, protocol="1.0")
    assert caught.value.context == {"client": "1.0", "service": PROTOCOL_VERSION}
    assert reads(service, save.id, protocol="1.1")["chunks"][0]["codec"] == "zstd-shuffle4"
    assert reads(service, save.id, protocol="1.1", digests=[digest_of(b"index")])["chunks"][0]["codec"] == "raw"


@pytest.mark.rule("protocol-version")
def test_an_older_client_is_given_the_raw_copy_where_there_is_one(service: RunningService, job: Job) -> None:
    save = job.begin(1)
    upload(save)
    commit(save)
    # Another run has sent it raw before the service had read the encoded copy.
    Job(service.http(), "demo/other").save(1, content=RAW)
    assert len(copies_of(service)) == 2
    (ticket,) = reads(service, save.id, protocol="1.0")["chunks"]
    assert (ticket["codec"], ticket["stored_bytes"]) == ("raw", len(RAW))


@pytest.mark.rule("report-is-suspicion")
def test_a_damaged_encoded_chunk_is_found_by_a_report_and_repaired_by_its_bytes(
    service: RunningService, job: Job
) -> None:
    save = job.begin(1)
    upload(save)
    commit(save)
    store = service.context.store
    assert isinstance(store, PosixStore)
    (copy,) = copies_of(service)
    path = store.object_path(object_key(copy.project_id, digest_of(RAW), copy))

    def report() -> Any:
        body = {"digest": digest_of(RAW), "problem": "mismatch"}
        return answer(service.http().post(f"/v1/checkpoints/{save.id}/chunk-reports", json=body))

    assert report()["readable"], "a wrong report marks nothing"
    path.chmod(0o644)
    path.write_bytes(STORED[:-1] + bytes([STORED[-1] ^ 0xFF]))
    found = report()
    assert not found["readable"]
    assert found["corrupt_checkpoints"] == [save.id]


def test_a_selected_checkpoint_tells_what_its_chunks_take_in_the_store(service: RunningService, job: Job) -> None:
    save = job.begin(1)
    upload(save)
    view = commit(save)
    assert (view["chunk_bytes"], view["uploaded_bytes"]) == (len(RAW) + len(b"index"), len(STORED) + len(b"index"))
    selected = answer(service.http().get("/v1/projects/demo/runs/gpt/checkpoints/1"))
    assert selected["stored_bytes"] == len(STORED) + len(b"index")
    # Another, larger copy takes nothing away from that.
    Job(service.http(), "demo/other").save(1, content=RAW)
    again = answer(service.http().get("/v1/projects/demo/runs/gpt/checkpoints/1"))
    assert again["stored_bytes"] == selected["stored_bytes"]
