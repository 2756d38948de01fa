"""Each parser of what others wrote, fed with what a hostile writer makes of it: it reads that, or raises the error that
it says, and nothing else. A bug in one of them would end a restore, a rebuild or a call by a stack trace."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h11
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr
from sqlalchemy import select, update

from holdfast.errors import TreeFormatError
from holdfast.state.tree import decode_tree, encode_tree
from holdfast_protocol.checkpoints import ForkedFrom
from holdfast_protocol.codecs import Codec, DecodeError, decode, encode
from holdfast_protocol.digests import DocumentError, canonical_bytes, compress
from holdfast_protocol.index_documents import Layout, Piece, SavedAs, Segment, ShardIndex, ShardLayout, TensorEntry
from holdfast_protocol.runs import SelectorError, parse_selector
from holdfast_protocol.states import AttemptOutcome, CheckpointKind, CheckpointState, CredentialKind, Health, Tier
from holdfast_service.attached_stores.ownership import (
    MARKER_NAME,
    ForeignStoreError,
    find_row,
    read_marker,
)
from holdfast_service.auth import credentials
from holdfast_service.context import ServiceContext
from holdfast_service.db.pages import decode_cursor, encode_cursor
from holdfast_service.db.tables.core import CatalogIdentity
from holdfast_service.errors import ProblemError, WentBackError
from holdfast_service.records import documents as records
from holdfast_service.records.history import FOLDER, KeptMemory
from holdfast_service.service import close_service, open_service
from holdfast_service.settings import ServiceSettings
from holdfast_service.web.connections import read_strictly
from tests.fuzz.mutations import JSON, altered, damaged

often = settings(max_examples=1000)

LAYOUT = Layout(
    2,
    {
        "model/b": TensorEntry("model", "float32", (4, 2), False),
        "model/a": TensorEntry("model", "bfloat16", (), True),
        "model/tied": TensorEntry("model", "float32", (4, 2), False, alias_of="model/b"),
    },
    (
        ShardLayout(
            (16, 2),
            (Piece("model/b", (0, 0), (2, 2), (Segment(0, 0, 16),)), Piece("model/a", (), (), (Segment(1, 0, 2),))),
        ),
        ShardLayout((16,), (Piece("model/b", (2, 0), (2, 2), (Segment(0, 0, 16),)),)),
    ),
)
INDEX = ShardIndex(SavedAs("demo/gpt", 20, 4), 3, "ab" * 32, {"loader": ["value", 1]}, {"model": ["module", None]})
DOCUMENTS = (LAYOUT, INDEX)


@often
@given(st.sampled_from(DOCUMENTS).flatmap(lambda document: altered(json.loads(document.canonical))))
def test_a_layout_and_an_index_are_read_or_refused(document: Any) -> None:
    data = compress(canonical_bytes(document))
    for kind in (Layout, ShardIndex):
        try:
            found = kind.decode(data)
        except DocumentError:
            continue
        assert kind.decode(found.encode()) == found, "what is read can be written again"
        if isinstance(found, Layout):
            found.torn()


@often
@given(damaged([document.encode() for document in DOCUMENTS]) | st.binary(max_size=200))
def test_damaged_bytes_of_a_layout_and_an_index_are_refused(data: bytes) -> None:
    for kind in (Layout, ShardIndex):
        with suppress(DocumentError):
            kind.decode(data)


TREE = encode_tree(
    {
        "plain": [1, 2.5, "x", None, True, (3, 4)],
        "sets": {1, 2},
        "moment": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        "ordered": OrderedDict(a=deque([1, 2], maxlen=3)),
        "array": np.arange(6, dtype=np.int32).reshape(2, 3),
        "number": np.float32(1.5),
        "complex": 1 + 2j,
    }
)


@often
@given(altered(json.loads(canonical_bytes(TREE))) | JSON)
def test_a_typed_tree_is_read_or_refused(encoded: Any) -> None:
    with suppress(TreeFormatError):
        decode_tree(encoded)


MOMENT = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
OWNER = {"catalog_id": "c", "project": records.ProjectFacts(id="a" * 32, name="demo")}
VERSION = OWNER | {"epoch": 1, "version": 2}
RUN = records.RunFacts(id="run_1", name="gpt")
DELETION = records.DeletionFacts(
    deleted_at=MOMENT, deleted_by="token_1", delete_reason=None, purge_at=MOMENT, purged_at=None
)
FORKED = ForkedFrom(project="demo", run="base", checkpoint_id="ck_2", attempt=1, step=10, saved_in="base")
ATTEMPT = records.AttemptFacts(
    number=2,
    launch_id="launch-1",
    world_size=2,
    host="node-1",
    environment={"torch": "2.13"},
    opened_at=MOMENT,
    ended_at=MOMENT,
    outcome=AttemptOutcome.PREEMPTED,
    outcome_detail=None,
    last_step=20,
    resumed_from_id="ck_0",
    resumed_from_attempt=1,
    resumed_from_step=10,
    cut_at=None,
)
CHECKPOINT = records.CheckpointFacts(
    id="ck_1",
    attempt=2,
    step=20,
    kind=CheckpointKind.PERIODIC,
    world_size=2,
    digest="ab" * 32,
    logical_bytes=10,
    chunk_bytes=10,
    uploaded_bytes=5,
    deduplicated_bytes=5,
    metrics={"loss": 1.5},
    components={"model": {"bytes": 10}},
    pushed_by=None,
    detached=False,
    forked_from=FORKED,
    created_at=MOMENT,
    committed_at=MOMENT,
)
HOLD = records.HoldFacts(
    id="hold_1",
    kind="legal",
    reason="a court's order",
    retain_until=None,
    mirror=True,
    mirrored_at=None,
    placed_at=MOMENT,
    placed_by_token="token_1",
    placed_by="ops",
    released_at=None,
    released_by=None,
    release_reason=None,
)
SHARD = records.ShardFacts(
    rank=0,
    digest="cd" * 32,
    index_ordinal=0,
    layout_ordinal=None,
    uploaded_bytes=5,
    deduplicated_bytes=5,
    sealed_at=MOMENT,
    components={},
)
POLICY = records.PolicyFacts(
    kind="retention", run_id="", document={"keep_last": 3}, version=1, updated_at=MOMENT, updated_by="ops"
)
RECORDS: tuple[records.Document, ...] = (
    records.ProjectRecord(
        **VERSION, quota_bytes=None, created_at=MOMENT, policies=[POLICY], deletion=DELETION, quotas={"quota_runs": 3}
    ),
    records.RunRecord(
        **VERSION,
        run=RUN,
        latest_attempt=2,
        created_at=MOMENT,
        attempts=[ATTEMPT],
        deletion=DELETION,
        tags=["a"],
        forked_from=FORKED,
    ),
    records.CheckpointRecord(
        **VERSION,
        run=RUN,
        attempt=ATTEMPT,
        checkpoint=CHECKPOINT,
        state=CheckpointState.COMMITTED,
        health=Health.OK,
        health_reason=None,
        tier=Tier.HOT,
        labels=["best"],
        pinned_at=MOMENT,
        pinned_by="ops",
        pin_reason="a paper",
        pinned_until=None,
        trashed_at=None,
        trashed_by=None,
        trash_reason=None,
        purge_at=None,
        holds=[HOLD],
    ),
    records.ManifestRecord(**OWNER, run=RUN, attempt=ATTEMPT, checkpoint=CHECKPOINT, shards=[SHARD]),
    records.ListRecord(digest="cd" * 32, chunks=[("ab" * 32, 10)], encoded=[(0, Codec.ZSTD, 5, "ef" * 32)]),
    records.RemovedRecord(catalog_id="c", epoch=1, checkpoint_id="ck_1"),
)
MODELS = tuple(type(record) for record in RECORDS)
REFUSED = (records.DamagedRecordError, records.NewerRecordError)


def test_the_records_are_of_all_models() -> None:
    everything = [
        kind for kind in vars(records).values() if isinstance(kind, type) and issubclass(kind, records.Document)
    ]
    assert set(MODELS) == {
        kind for kind in everything if "kind" in kind.model_fields and kind.__name__.endswith("Record")
    }


@often
@given(st.sampled_from(RECORDS).flatmap(lambda record: altered(json.loads(records.encode(record)))), st.booleans())
def test_a_record_is_read_or_refused(outer: Any, signs: bool) -> None:
    """`signs`: who alters it writes the digest anew."""
    if signs:
        outer["sha256"] = hashlib.sha256(canonical_bytes(outer.get("record"))).hexdigest()
    for model in MODELS:
        with suppress(*REFUSED):
            found = records.decode(canonical_bytes(outer), model)
            assert records.decode(records.encode(found), model) == found, "what is read can be written again"


@often
@given(st.sampled_from(RECORDS).flatmap(lambda record: damaged([records.encode(record)])) | st.binary(max_size=200))
def test_damaged_bytes_of_a_record_are_refused(data: bytes) -> None:
    for model in MODELS:
        with suppress(*REFUSED):
            assert records.decode(data, model) in RECORDS, "a space between two values says nothing"


NAMES = [
    f"records/{'a' * 32}/project/000001.0000000002.json",
    f"records/{'a' * 32}/checkpoints/ck_1/lists/{'b' * 64}.json",
]


@often
@given(damaged([name.encode() for name in NAMES]).map(lambda data: data.decode("utf-8", "replace")) | st.text())
def test_a_name_of_a_record_is_read_or_none(name: str) -> None:
    found = records.parse_name(name)
    if found is not None:
        assert found.version is None or found.list_digest is None


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceContext]:
    folder = tmp_path_factory.mktemp("service")
    url = SecretStr(f"sqlite:///{folder / 'catalog.db'}")
    context = open_service(ServiceSettings(database_url=url, data_dir=folder, store=f"posix://{folder / 'store'}"))
    yield context
    close_service(context)


def of_store(context: ServiceContext) -> tuple[Path, CatalogIdentity]:
    with context.database.read() as session:
        return context.settings.data_dir / "store", session.scalars(select(CatalogIdentity)).one()


MARKER = {"catalog_id": "c", "epoch": 3, "store_id": 1, "claim": "ab" * 16}
DEEP = b"[" * 60_000


@often
@given(
    altered(MARKER).map(lambda marker: json.dumps(marker).encode())
    | damaged([json.dumps(MARKER).encode()])
    | st.binary(max_size=200)
)
@example(b'{"catalog_id": "c", "epoch": Infinity, "store_id": 1}')
@example(b'{"catalog_id": "c", "epoch": 1, "store_id": 9223372036854775808}')
@example(b'{"catalog_id": "\\ud800", "epoch": 1, "store_id": 1}')
@example(DEEP)
@example(json.dumps(MARKER).encode() + b" " * 2**20)
def test_the_marker_of_a_store_is_read_or_refused(service: ServiceContext, content: bytes) -> None:
    """What is read finds a row, whatever its number."""
    folder, _ = of_store(service)
    before = (folder / MARKER_NAME).read_bytes()
    try:
        (folder / MARKER_NAME).write_bytes(content)
        with suppress(ForeignStoreError):
            found = read_marker(service.store)
            assert find_row(service.database, f"posix://{folder}", "posix", found, found.catalog_id).id == 1
            (folder / MARKER_NAME).write_text(json.dumps(asdict(found)))
            assert read_marker(service.store) == found, "what is read can be written again"
    finally:
        (folder / MARKER_NAME).write_bytes(before)


HISTORY = {
    "catalog_id": "c",
    "epoch": 1,
    "claim": "",
    "kept_at": "2026-01-01T00:00:00+00:00",
    "marks": [[1, 7], [2, 3]],
    "changes": [[1, 7, "a run was made"], [2, 3, "a run was deleted"]],
}
MOMENTS = ["2026-01-01T00:00:00", "0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00+23:59"]


@settings(max_examples=500)
@given(
    altered(HISTORY) | st.sampled_from(MOMENTS).map(lambda moment: HISTORY | {"kept_at": moment}),
    st.binary(max_size=20),
    st.booleans(),
)
@example(HISTORY | {"marks": [[float("inf"), 1]]}, b"", True)
@example(HISTORY | {"changes": [[1, 7, "\ud800"]]}, b"", True)
@example(HISTORY, DEEP, False)
@example(HISTORY, b" " * 2**21, False)
def test_what_a_process_kept_of_its_changes_is_compared_or_passed_over(
    service: ServiceContext, document: dict[str, Any], data: bytes, whole: bool
) -> None:
    """`whole`: JSON of this catalog, else with bytes put before it."""
    folder, identity = of_store(service)
    ours = {"catalog_id": identity.catalog_id, "epoch": identity.epoch, "claim": identity.claim}
    content = json.dumps(document | {name: ours[name] for name in ours if document.get(name) == HISTORY[name]})
    kept = folder / FOLDER / "0123456789abcdef.json"
    try:
        kept.write_bytes(content.encode() if whole else data + content.encode())
        memory = KeptMemory(service.database, service.store, identity)
        memory.keep()
        with suppress(WentBackError):
            memory.compare("server")
        memory.forget_the_gone()
    finally:
        kept.unlink(missing_ok=True)
        with service.database.transaction() as session:
            session.execute(update(CatalogIdentity).values(went_back=None, went_back_epoch=None))


CHUNK = np.arange(3000, dtype=np.float32).tobytes()


def encoded(codec: Codec) -> bytes:
    found = encode(memoryview(CHUNK), codec, most_bytes=2 * len(CHUNK))
    assert found is not None
    return bytes(found)


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.RAW])
@often
@given(data=st.data(), size=st.integers(0, 2 * len(CHUNK)), cut=st.integers(1, 5000))
def test_an_encoded_chunk_is_read_to_its_size_or_refused(codec: Codec, data: Any, size: int, cut: int) -> None:
    stored = data.draw(damaged([encoded(codec)]))
    pieces = (stored[at : at + cut] for at in range(0, len(stored), cut))
    with suppress(DecodeError):
        assert sum(len(block) for block in decode(codec, size, pieces)) == size


SELECTORS = [
    b"demo/gpt",
    b"demo/gpt@latest",
    b"demo/gpt@1200#3",
    b"demo/gpt@best:loss:max",
    b"demo/gpt@ck_" + b"0" * 32,
]


@often
@given(damaged(SELECTORS).map(lambda data: data.decode("utf-8", "replace")) | st.text())
def test_a_selector_is_read_or_refused_and_read_again_as_the_same(text: str) -> None:
    try:
        run, point = parse_selector(text)
    except SelectorError:
        return
    assert parse_selector(f"{run}@{point}") == (run, point)


TOKEN = b"hold_0123456789abcdef_" + b"89ab" * 16


@often
@given(damaged([TOKEN]).map(lambda data: data.decode("utf-8", "replace")) | st.text(), st.sampled_from(CredentialKind))
def test_a_token_is_read_or_refused_without_its_text(text: str, kind: CredentialKind) -> None:
    found, told = None, ""
    try:
        found, _ = credentials.parse(kind, text)
    except ValueError as error:
        told = str(error)
    assert len(text) < 40 or text not in told
    assert found is None or text[:-64] == f"{kind}_{found}_"


CURSOR = encode_cursor("runs", "2026-01-01T00:00:00+00:00", 7).encode()


@often
@given(damaged([CURSOR]).map(lambda data: data.decode("utf-8", "replace")) | st.text())
def test_a_cursor_is_read_or_refused(text: str) -> None:
    with suppress(ProblemError):
        assert [type(part) for part in decode_cursor("runs", text, str, int)] == [str, int]


REQUESTS = [
    b"POST /v1/tokens HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nbytes",
    b"PUT /v1/prices HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nbytes\r\n0\r\nX: y\r\n\r\n",
    b"GET /healthz HTTP/1.0\r\n\r\n",
]


@often
@given(damaged(REQUESTS))
def test_a_request_is_read_or_refused_and_says_once_where_it_ends(sent: bytes) -> None:
    connection = h11.Connection(h11.SERVER)
    read_strictly(connection)
    connection.receive_data(sent)
    with suppress(h11.RemoteProtocolError):
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.ConnectionClosed):
                break
            if isinstance(event, h11.Request):
                names = [name for name, _ in event.headers]
                assert names.count(b"content-length") + names.count(b"transfer-encoding") <= 1
