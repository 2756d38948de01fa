"""What a rank says of its shard arrives as it was said: in the row, over REST, in the record beside the data, in a
catalog that was rebuilt from it, and in `holdfast checkpoints show`. Every field of a ShardSummary, later ones too."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import select
from typer.testing import CliRunner

from holdfast_client import Client, ClientSettings
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.chunks.uploader import ShardUploader
from holdfast_client.cli.main import app
from holdfast_protocol.base import Fence, RunName
from holdfast_protocol.checkpoints import (
    BeginCheckpoint,
    Component,
    HealthVerdict,
    IndexOrdinals,
    MetricValue,
    SealShard,
    ShardContent,
    ShardSummary,
    ShardView,
)
from holdfast_protocol.digests import shard_digest
from holdfast_service.catalog_check.compare_records import checkpoint_differences
from holdfast_service.db.tables.core import Checkpoint, Shard
from holdfast_service.records.content import checkpoint_record, manifest_record
from holdfast_service.records.documents import ManifestRecord, ShardFacts, decode, encode
from holdfast_service.records.scanning import scan_records
from holdfast_service.settings import ServiceSettings
from tests.support.rank import Job, Refused
from tests.support.rebuilt import rebuilt_service, record_all
from tests.support.service import RunningService

RUN = RunName("demo", "gpt")
CHUNKS = [b"weights " * 100, b"index", b"layout"]
SAID: dict[str, Any] = {
    "components": {
        "model": Component(kind="model", logical_bytes=700),
        "ema": Component(kind="rng", logical_bytes=1),
    },
    "logical_bytes": 701,
    "finite": False,
    "metrics": {"loss": MetricValue.of(0.1 + 0.2), "gap": MetricValue.of(float("nan"))},
    "verdict": HealthVerdict(healthy=False, reason="a spike"),
    "dropped_components": ["aux", "old"],
}
"""What has a shape of its own; a field that is added is a number."""


def summary() -> ShardSummary:
    """None of its fields has its default."""
    number = {name: 1.5 + place for place, name in enumerate(ShardSummary.model_fields) if name not in SAID}
    said = ShardSummary.model_validate(SAID | number)
    assert not {name for name, field in ShardSummary.model_fields.items() if getattr(said, name) == field.default}
    return said


def client_of(service: RunningService) -> Client:
    return Client(ClientSettings(url=service.url, token=service.token(), retry_seconds=5))


def save(client: Client, said: ShardSummary, *, step: int = 5) -> str:
    opened = client.attempts.open_next(RUN, "launch-1", world_size=1, host="", environment={}, create=None)
    fence = Fence(epoch=opened.epoch, attempt=opened.attempt, launch_id="launch-1")
    begun = client.checkpoints.begin(
        RUN.project, RUN.run, BeginCheckpoint(**fence.model_dump(), step=step, world_size=1)
    )
    digests = ShardUploader(client, begun.id, 0, fence).upload(map(OutgoingChunk.of, CHUNKS)).digests
    seal = SealShard(
        **dict(fence),
        **dict(said),
        digest=shard_digest(digests),
        chunks=digests,
        index=IndexOrdinals(shard=1, layout=2),
    )
    assert client.checkpoints.seal(begun.id, 0, seal).state == "committed"
    return begun.id


def shown(service: RunningService, *arguments: str) -> str:
    environment = {"HOLDFAST_URL": service.url, "HOLDFAST_TOKEN": service.token(), "COLUMNS": "80"}
    result = CliRunner().invoke(app, ["checkpoints", "show", "demo/gpt@5", "--shards", *arguments], env=environment)
    assert result.exit_code == 0, result.stderr + result.stdout
    return result.stdout


def arrived(service: RunningService, checkpoint_id: str) -> dict[str, ShardSummary]:
    """By the place that says it."""
    with client_of(service) as client:
        (of_rest,) = client.checkpoints.manifest(checkpoint_id).shards
    with service.context.database.read() as session:
        (row,) = session.scalars(select(Shard).where(Shard.checkpoint_id == checkpoint_id))
        of_columns = {name: getattr(row, name) for name in ShardSummary.model_fields}
    (of_cli,) = json.loads(shown(service, "--json"))
    return {
        "row": ShardSummary.model_validate(of_columns),
        "REST": of_rest.summary,
        "show": ShardView.model_validate(of_cli).summary,
    }


def test_every_field_arrives_unchanged_everywhere(
    service: RunningService, settings: ServiceSettings, empty_url: str
) -> None:
    said = summary()
    with client_of(service) as client:
        checkpoint_id = save(client, said)
    assert arrived(service, checkpoint_id) == dict.fromkeys(("row", "REST", "show"), said)

    record_all(service.context)
    (record,) = [each for each in scan_records(service.context.store) if each.subject.subject_id == checkpoint_id]
    written = service.context.store.read_named(record.subject.manifest_name)
    (facts,) = decode(written, ManifestRecord).shards
    assert facts.summary == said
    assert set(json.loads(written)["record"]["shards"][0]) >= set(ShardSummary.model_fields)

    with rebuilt_service(settings, empty_url) as (again, report):
        assert report.whole, report.lines()
        assert arrived(again, checkpoint_id) == dict.fromkeys(("row", "REST", "show"), said)


def test_people_read_every_field(service: RunningService) -> None:
    with client_of(service) as client:
        save(client, summary())
    heading, row = shown(service).splitlines()
    assert not [name for name in ShardSummary.model_fields if name.replace("_", " ") not in heading]
    for words in ("ema (1 B), model (700 B)", "gap nan, loss 0.3", "a spike", "aux, old", "701 B", "no"):
        assert f" {words} " in row
    with client_of(service) as client:
        save(client, ShardSummary(), step=6)
    assert (
        "blocked"
        not in CliRunner()
        .invoke(
            app,
            ["checkpoints", "show", "demo/gpt@6", "--shards"],
            env={"HOLDFAST_URL": service.url, "HOLDFAST_TOKEN": service.token()},
        )
        .stdout.splitlines()[0]
    ), "a column in which nobody says anything is left out"


def test_a_repeated_seal_may_measure_again_and_must_not_say_anything_else(service: RunningService) -> None:
    job = Job(service.http(), "demo/gpt")
    begun = job.begin(5)
    data = [b"layout", b"index"]
    first = begun.write(0, data, blocked_seconds=1.0)
    assert begun.seal(0, data, blocked_seconds=2.0) == first
    different = {"components": {}, "logical_bytes": 1, "finite": False, "metrics": {"loss": {"value": 1.0}}}
    different |= {"verdict": {"healthy": True}, "dropped_components": ["ema"]}
    assert different.keys() == ShardContent.model_fields.keys()
    for name, value in different.items():
        with pytest.raises(Refused) as refused:
            begun.seal(0, data, **{name: value})
        assert (refused.value.code, refused.value.context["different"]) == ("manifest_conflict", [name])


def test_a_record_of_an_older_version_has_defaults_and_one_of_a_newer_version_can_be_read(
    service: RunningService,
) -> None:
    with client_of(service) as client:
        checkpoint_id = save(client, summary())
    record_all(service.context)
    (record,) = [each for each in scan_records(service.context.store) if each.subject.subject_id == checkpoint_id]
    manifest = decode(service.context.store.read_named(record.subject.manifest_name), ManifestRecord)
    (facts,) = manifest.model_dump(mode="json")["shards"]
    beside = {name: value for name, value in facts.items() if name not in ShardSummary.model_fields}
    assert ShardFacts.model_validate(beside).summary == ShardSummary()
    newer = _Newer.model_validate(manifest.model_dump() | {"shards": [facts | {"tomorrow": 1}]})
    newer.shards[0]["components"]["model"]["tomorrow"] = {"more": 1}
    (read,) = decode(encode(newer), ManifestRecord).shards
    assert read.summary == manifest.shards[0].summary


def test_the_check_compares_every_field_of_a_row_with_its_record(service: RunningService) -> None:
    with client_of(service) as client:
        checkpoint_id = save(client, summary())
    with service.context.database.transaction() as session:
        checkpoint = session.get_one(Checkpoint, checkpoint_id)
        document = checkpoint_record(session, service.context, checkpoint)
        manifest = manifest_record(session, service.context, checkpoint)
        assert not checkpoint_differences(session, service.context, document, manifest)
        session.scalars(select(Shard).where(Shard.checkpoint_id == checkpoint_id)).one().summary = ShardSummary()
        session.flush()
        told = checkpoint_differences(session, service.context, document, manifest)
        assert {each.partition(" of rank 0 is ")[0] for each in told} == ShardSummary.model_fields.keys()


class _Newer(ManifestRecord):
    """As a later version writes it."""

    shards: list[dict[str, Any]]  # type: ignore[assignment]


def test_a_service_of_before_1_5_says_less_of_a_shard() -> None:
    older = {"rank": 0, "state": "sealed", "digest": "d", "chunk_count": 3, "index_digest": "i", "finite": True}
    assert ShardView.model_validate(older | {"logical_bytes": 7}).summary == ShardSummary(logical_bytes=7)
