"""The fetcher if one of two stores gives no chunks: the next tickets are for the other one, and that is told."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator

import pytest

from holdfast_client import Client, ClientSettings
from holdfast_client.chunks import fetcher as fetcher_module
from holdfast_client.chunks.fetcher import ShardFetcher
from holdfast_client.chunks.transfer import MountAccess
from holdfast_client.errors import DirectFileRefused
from holdfast_protocol.checkpoints import MountProofOffer
from holdfast_protocol.states import StoreRole
from tests.support.scripted_http import Reply, ScriptedServer, as_json


class TwoStores(ScriptedServer):
    """`/primary/…` does not give the bytes and `/second/…` has them."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.of_primary = Reply(503, b"<Code>ServiceUnavailable</Code>")
        super().__init__(self.respond)

    def respond(self, seen):
        if seen.path == "/v1/mount-proofs":
            return as_json({"proof_id": None, "path": None, "expires_in_seconds": 60})
        if seen.path.endswith("/reads"):
            return self.reads(seen.json)
        _, store, digest = seen.path.split("/") if seen.path.count("/") == 2 else ("", "", "")
        if store == "primary":
            return self.of_primary
        return Reply(200, self.objects[digest]) if digest else Reply(204)

    def reads(self, body):
        avoided = "primary" in body.get("avoid_stores", [])
        store = "second" if avoided else "primary"
        return as_json(
            {
                "lease_id": "lease-1",
                "lease_expires_in_seconds": 60,
                "chunks": [
                    {
                        "digest": digest,
                        "bytes": len(self.objects[digest]),
                        "stored_bytes": len(self.objects[digest]),
                        "kind": "http",
                        "url": f"/{store}/{digest}",
                        "expires_in_seconds": 60,
                        "store": store,
                        "elsewhere": not avoided,
                    }
                    for digest in body["digests"]
                ],
            }
        )


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoStores]:
    monkeypatch.setattr(fetcher_module, "ELSEWHERE_AFTER_SECONDS", 0.05)
    bodies = [os.urandom(1000 + number) for number in range(150)]
    started = TwoStores({hashlib.sha256(body).hexdigest(): body for body in bodies})
    yield started
    started.close()


@pytest.mark.rule("store-outage-degrades")
@pytest.mark.parametrize(
    ("answer", "told_of_it"),
    [
        (Reply(503, b"<Code>ServiceUnavailable</Code>"), "answer"),
        (Reply(403, b"<Code>AccessDenied</Code>"), "give chunks"),
        (Reply(404, b"<Code>NoSuchBucket</Code>"), "give chunks"),
    ],
    ids=["is silent", "refuses each ticket", "refuses"],
)
def test_what_a_store_does_not_give_comes_from_the_other_and_it_is_not_asked_again(
    service: TwoStores, caplog: pytest.LogCaptureFixture, answer: Reply, told_of_it: str
) -> None:
    service.of_primary = answer
    found: dict[str, bytes] = {}
    settings = ClientSettings(url=service.url, token="hold_t_s", retry_seconds=60)
    with Client(settings) as client, ShardFetcher(client, "ck_1") as fetcher:
        fetcher.fetch(service.objects, lambda digest, view: found.__setitem__(digest, bytes(view)))
        assert fetcher.bytes_from == {StoreRole.SECOND: sum(map(len, service.objects.values()))}
    assert found == service.objects
    reads = [seen.json for seen in service.of("POST", "/v1/checkpoints/ck_1/reads")]
    assert not reads[0]["avoid_stores"]
    first_avoiding = next(place for place, body in enumerate(reads) if body["avoid_stores"])
    assert all(body.get("avoid_stores") == ["primary"] for body in reads[first_avoiding:])
    told = [record for record in caplog.records if f"the primary store does not {told_of_it} (" in record.getMessage()]
    assert len(told) == 1, "it is told once, and not for each chunk"
    assert told[0].levelno == logging.WARNING


def test_a_mount_that_is_unavailable_is_asked_about_again_and_others_are_proven(tmp_path) -> None:
    file = tmp_path / "proofs" / ("1" * 32)
    file.parent.mkdir()
    file.write_text("ab" * 32)
    second = MountProofOffer(proof_id=file.name, path=str(file), expires_in_seconds=60)
    nothing = MountProofOffer(proof_id=None, path=None, expires_in_seconds=60)
    asked = []

    def offer() -> MountProofOffer:
        asked.append(1)
        return nothing.model_copy(update={"unavailable": len(asked) == 1, "others": [second]})

    mount = MountAccess(offer, enabled=True)
    assert mount.proof() is None
    assert [proof.proof_id for proof in mount.other_proofs()] == ["1" * 32]
    assert len(asked) == 1
    mount.check_read(str(tmp_path / "p1" / "chunks" / "00"))
    for outside in (f"{tmp_path}/../x", "/etc/passwd"):
        with pytest.raises(DirectFileRefused):
            mount.check_read(outside)
    with pytest.raises(DirectFileRefused):  # of another store than the one that is written to
        mount.check_write(f"{tmp_path}/incoming/0123456789")
    mount._renew_at = 0.0
    mount.proof()
    assert len(asked) == 2, "a store that was unavailable is given up for good"
    mount.give_up()
    assert (mount.proof(), mount.other_proofs()) == (None, [])
    with pytest.raises(DirectFileRefused):  # by a ticket from before
        mount.check_read(str(tmp_path / "p1" / "chunks" / "00"))
