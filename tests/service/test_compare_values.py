"""How far apart the tensors of two checkpoints are: read by a worker, verified, within its memory; killed, damaged,
cancelled and refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sqlalchemy import func, select, update

from holdfast.layout.plan import ChunkSizes, global_layout
from holdfast_protocol.index_documents import SavedAs, ShardIndex
from holdfast_protocol.states import CopyState, Scope, StoreRole
from holdfast_service.background.registry import OPERATION_KINDS
from holdfast_service.comparisons import batches, compare_values
from holdfast_service.comparisons.read_batch import ChunkReader
from holdfast_service.copies.copy_chunk import begin_copy, copy_now
from holdfast_service.db.tables.core import Chunk, Copy, ReadLease
from holdfast_service.db.tables.operations import Operation
from holdfast_service.operations import queue
from holdfast_service.operations.controller import OperationsReport, claim_next, reconcile
from holdfast_service.restore import service_reader
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import ObjectKey, StoreUnavailable
from tests.service.conftest import Clock
from tests.support.death import Killed, kill
from tests.support.rank import Job, Refused, answer
from tests.support.rot import attached, copies_of, flip, key_of, overwrite, states_of
from tests.support.saved_tensors import Cut, bytes_of, chunks_of, in_columns, in_rows, plans_of, save_tensors
from tests.support.service import RunningService

MEMORY = 1024**2
CHUNKS = ChunkSizes(own_chunk_bytes=4096, pack_bytes=65536, cut_bytes=65536)


@pytest.fixture
def settings(settings: ServiceSettings, tmp_path: Any) -> ServiceSettings:
    """So little memory that what the tests compare takes several batches."""
    return settings.model_copy(
        update={"comparison_memory_bytes": MEMORY, "second_store": f"posix://{tmp_path / 'second'}"}
    )


def random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def start(service: RunningService, before: str, after: str, *, token: str | None = None, **body: Any) -> Any:
    http = service.http() if token is None else service.http(token=token)
    return answer(http.post(f"/v1/checkpoints/{after}/comparisons", json={"against": before, **body}))


def shown(service: RunningService, started: Any) -> Any:
    return answer(service.http().get(f"/v1/operations/{started['id']}"))


def compare(service: RunningService, before: str, after: str, **body: Any) -> Any:
    """What came of it."""
    started = start(service, before, after, **body)
    reconcile(service.context, kinds=OPERATION_KINDS)
    ended = shown(service, started)
    assert (ended["state"], ended["error"]) == ("done", None)
    return ended["result"]


def pair(
    service: RunningService,
    before: dict[str, torch.Tensor],
    after: dict[str, torch.Tensor],
    *,
    ranks: tuple[int, int] = (1, 1),
    cuts: tuple[Cut | None, Cut | None] = (None, None),
) -> tuple[str, str]:
    """The ids of two checkpoints, of two launches."""
    first = save_tensors(Job(service.http(), world_size=ranks[0]), 10, before, cut=cuts[0], sizes=CHUNKS)
    second = save_tensors(Job(service.http(), after=1, world_size=ranks[1]), 20, after, cut=cuts[1], sizes=CHUNKS)
    return first, second


def check(found: dict[str, Any], before: torch.Tensor, after: torch.Tensor) -> None:
    """As torch computes it in float64."""
    one, other = before.to(torch.float64).reshape(-1), after.to(torch.float64).reshape(-1)
    difference = other - one
    told = {
        "elements": one.numel(),
        "norm_before": float(one.norm()),
        "norm_after": float(other.norm()),
        "norm_difference": float(difference.norm()),
        "relative_change": float(difference.norm() / one.norm()),
        "largest_difference": float(difference.abs().max()),
        "cosine": float(one @ other / one.norm() / other.norm()),
    }
    assert {name: found[name] for name in told} == pytest.approx(told, rel=1e-9)


def test_a_plan_is_made_in_slices_between_calls_of_jobs(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = pair(service, *({f"model/{name}": random(9, seed=seed) for name in "abc"} for seed in (1, 2)))
    gave_way: list[float] = []
    monkeypatch.setattr(compare_values, "_SLICE_SECONDS", 0.0)
    monkeypatch.setattr(service.context.load, "yield_to_callers", lambda most, stopping: gave_way.append(most))
    assert compare(service, *ids, dry_run=True)["differing"] == 3
    assert len(gave_way) >= 5 * 3, "at each tensor, in each step of the plan"


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def test_what_differs_is_read_and_measured_and_what_digests_prove_equal_is_not(service: RunningService) -> None:
    before = {f"model/{dtype}".replace("torch.", ""): random(90, 11, dtype=dtype) for dtype in DTYPES}
    before |= {"model/steps": torch.tensor([2**61, 7]), "optimizer/flags": torch.tensor([True, False, True])}
    before |= {"model/kept": random(40, 40), "model/gone": random(3), "model/cast": random(300)}
    after = {name: random(*each.shape, seed=2, dtype=each.dtype) for name, each in before.items() if each.ndim == 2}
    after |= {"model/steps": torch.tensor([2**61 + 5, 7]), "optimizer/flags": torch.tensor([True, True, True])}
    after |= {"model/kept": before["model/kept"], "model/new": random(3), "model/cast": random(300).half()}
    ids = pair(service, before, after)
    found = compare(service, *ids)
    assert (found["before"], found["after"]) == ids
    assert (found["only_before"], found["only_after"], found["other_form"], found["equal"]) == (1, 1, 1, 1)
    measured = {each["name"]: each for each in found["tensors"]}
    assert measured.keys() == {name for name in before if name not in ("model/kept", "model/gone", "model/cast")}
    for name, each in measured.items():
        if name == "model/steps":
            assert each["largest_difference"] == 5, "float64 cannot tell the two apart"
        else:
            check(each, before[name], after[name])
    assert (measured["model/bfloat16"]["dtype"], measured["model/bfloat16"]["shape"]) == ("bfloat16", [90, 11])
    changes = [each["relative_change"] for each in found["tensors"]]
    assert changes == sorted(changes, reverse=True)
    components = {each["name"]: each for each in found["components"]}
    assert {name: each["tensors"] for name, each in components.items()} == {"model": 6, "optimizer": 1}
    check(components["optimizer"], before["optimizer/flags"], after["optimizer/flags"])
    in_all = [before[name].double().norm() for name in measured if name.startswith("model/")]
    assert components["model"]["norm_before"] == pytest.approx(float(torch.stack(in_all).norm()), rel=1e-9)
    assert found["read_bytes"] == found["bytes_to_read"] > 0
    assert found["not_compared"] == []
    with service.context.database.read() as session:
        assert session.scalar(select(func.count()).select_from(ReadLease)) == 0, "its leases are given back"


@pytest.mark.parametrize("cuts", [(in_rows, in_rows), (in_rows, in_columns), (None, in_columns)])
def test_two_saves_of_other_world_sizes_and_shardings_are_compared_by_the_bytes_of_the_tensor(
    service: RunningService, cuts: tuple[Cut | None, Cut | None]
) -> None:
    before = {"model/wide": random(301, 640), "model/flat": random(70_001), "model/one": random(1, 5, 30)}
    after = {name: each + random(*each.shape, seed=9) / 100 for name, each in before.items()}
    after["model/small"] = before["model/small"] = random(12)
    ids = pair(service, before, after, ranks=(2, 3), cuts=cuts)
    dry = compare(service, *ids, dry_run=True)
    assert dry["differing"] in (3, 4), "the small one may share a chunk with what has changed"
    assert (dry["read_bytes"], dry["tensors"]) == (0, [])
    assert sum(len(bytes_of(each)) for each in before.values()) * 2 > MEMORY, "several batches"
    found = compare(service, *ids)
    assert found["read_bytes"] == dry["bytes_to_read"] > MEMORY
    assert (found["differing"], found["equal"], found["not_compared"]) == (3, 1, [])
    for each in found["tensors"]:
        check(each, before[each["name"]], after[each["name"]])


def test_what_is_not_finite_is_counted_and_comes_first_and_some_dtypes_are_told_as_not_compared(
    service: RunningService,
) -> None:
    before = {"m/a": random(2000), "m/b": random(2000), "m/zero": torch.zeros(2000), "m/complex": torch.ones(9) + 1j}
    after = {"m/a": before["m/a"].clone(), "m/b": before["m/b"] * 3, "m/zero": torch.ones(2000)}
    after["m/complex"] = torch.ones(9) + 2j
    after["m/a"][:4] = torch.tensor([math.nan, math.nan, math.inf, -math.inf])
    ids = pair(service, before, after)
    found = compare(service, *ids)
    assert [each["name"] for each in found["tensors"]] == ["m/a", "m/zero", "m/b"]
    poisoned, zero, _ = found["tensors"]
    assert (poisoned["nan_before"], poisoned["nan_after"]) == (0, 2)
    assert (poisoned["infinite_before"], poisoned["infinite_after"]) == (0, 2)
    assert (poisoned["norm_difference"], poisoned["elements"]) == (0, 2000)
    assert (zero["relative_change"], zero["cosine"]) == (None, None)
    assert found["not_compared"] == [{"name": "m/complex", "reason": "dtype"}]
    first = compare(service, *ids, most_tensors=1)
    assert [each["name"] for each in first["tensors"]] == ["m/a"]
    assert (first["differing"], first["components"]) == (3, found["components"])


def large(seed: int = 1) -> dict[str, torch.Tensor]:
    """Of many batches."""
    return {f"model/{number}": random(100, 700, seed=seed + number) for number in range(8)}


def copied(service: RunningService, content: bytes) -> None:
    """The chunk is in the second store too."""
    second = attached(service, StoreRole.SECOND).store_id
    with service.context.database.transaction() as session:
        task = begin_copy(session, service.context, copies_of(service, content)[0].chunk_id, second)
    assert task is not None
    assert copy_now(service.context, task)


def test_a_killed_worker_s_comparison_goes_on_with_the_batch_that_it_was_at(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "WRITTEN_EVERY_SECONDS", 0.0)
    before, after = large(), large(50)
    ids = pair(service, before, after)
    started = start(service, *ids)
    read = []
    real = compare_values.read_batch
    with monkeypatch.context() as dying:
        died = kill(dying, compare_values, "read_batch", at=3)
        with pytest.raises(Killed):
            reconcile(service.context, kinds=OPERATION_KINDS)
        assert died()
    assert shown(service, started)["state"] == "running"
    clock.advance(service.context.settings.lease_seconds + 1)

    def counted(*args: Any) -> Any:
        read.append(args[2])
        return real(*args)

    monkeypatch.setattr(compare_values, "read_batch", counted)
    assert reconcile(service.context, kinds=OPERATION_KINDS) == OperationsReport(done=1)
    found = shown(service, started)
    assert (found["state"], found["tries"]) == ("done", 2)
    result, read_after_death = found["result"], len(read)
    again = compare(service, *ids)
    assert again == result
    assert len(read) == read_after_death * 2 + 2, "the first two batches were not read again"
    for each in result["tensors"]:
        check(each, before[each["name"]], after[each["name"]])
    with service.context.database.read() as session:
        assert session.get_one(Operation, started["id"]).kept is None


def test_names_that_no_database_keeps_are_measured_and_shown_with_a_mark(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer names its tensors as it likes, and one such name must not take the list of operations from everybody.
    What is measured of them outlives a worker all the same."""
    monkeypatch.setattr(queue, "WRITTEN_EVERY_SECONDS", 0.0)
    odd = "m/\x00\ud800\x1b[2J"
    before, after = ({odd: random(200_000, seed=seed)} for seed in (1, 2))
    before["m/\ud801"], after["m/\ud801"] = torch.ones(9) + 1j, torch.ones(9) + 2j
    started = start(service, *pair(service, before, after))
    with monkeypatch.context() as dying:
        died = kill(dying, compare_values, "read_batch", at=2)
        with pytest.raises(Killed):
            reconcile(service.context, kinds=OPERATION_KINDS)
        assert died()
    clock.advance(service.context.settings.lease_seconds + 1)
    assert reconcile(service.context, kinds=OPERATION_KINDS).done == 1
    found = shown(service, started)["result"]
    assert answer(service.http().get("/v1/operations"))["items"][0]["result"] == found
    [measured] = found["tensors"]
    assert measured["name"] == "m/\ufffd\ufffd\ufffd[2J"
    check(measured, before[odd], after[odd])
    assert found["not_compared"] == [{"name": "m/\ufffd", "reason": "dtype"}]


def test_a_worker_that_plans_for_long_keeps_the_operation(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "WRITTEN_EVERY_SECONDS", 0.0)
    started = start(service, *pair(service, large(), large(50)))
    real, taken = batches._subject, []

    def slow(*args: Any) -> Any:
        clock.advance(0.6 * service.context.settings.lease_seconds)
        taken.append(claim_next(service.context, [compare_values.KIND], "another"))
        return real(*args)

    monkeypatch.setattr(batches, "_subject", slow)
    assert reconcile(service.context, kinds=OPERATION_KINDS) == OperationsReport(done=1)
    assert taken == [None] * len(large())
    assert shown(service, started)["tries"] == 1


def test_a_damaged_copy_is_suspected_and_another_one_read_and_without_one_the_tensor_is_told(
    service: RunningService,
) -> None:
    before, after = large(), large(50)
    ids = pair(service, before, after)
    whole = compare(service, *ids)
    chunk = bytes_of(after["model/3"])[: CHUNKS.cut_bytes]
    primary = attached(service, StoreRole.PRIMARY).store
    key = key_of(service, chunk)
    flip(primary, key)
    found = compare(service, *ids)
    assert found["not_compared"] == [{"name": "model/3", "reason": "damaged"}]
    assert (found["differing"], len(found["tensors"])) == (7, 7)
    assert states_of(service, chunk) == [CopyState.SUSPECT]
    overwrite(primary, key, chunk)
    other = bytes_of(after["model/5"])[: CHUNKS.cut_bytes]
    copied(service, other)
    flip(primary, key_of(service, other))
    found = compare(service, *ids)
    assert found == whole
    assert states_of(service, other) == [CopyState.SUSPECT]
    assert [copy.state for copy in copies_of(service, other, StoreRole.SECOND)] == [CopyState.VERIFIED]


def test_a_bad_copy_does_not_hide_another_that_somebody_has_suspected(service: RunningService) -> None:
    """A suspicion is no finding: such a copy is read again, and may be good."""
    before, after = large(), large(50)
    ids = pair(service, before, after)
    whole = compare(service, *ids)
    chunk = bytes_of(after["model/3"])[: CHUNKS.cut_bytes]
    copied(service, chunk)
    flip(attached(service, StoreRole.PRIMARY).store, key_of(service, chunk))
    [other] = copies_of(service, chunk, StoreRole.SECOND)
    with service.context.database.transaction() as session:
        session.execute(update(Copy).where(Copy.id == other.id).values(state=CopyState.SUSPECT))
    assert compare(service, *ids) == whole


def test_what_the_first_store_does_not_give_is_read_from_the_second(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = large(), large(50)
    ids = pair(service, before, after)
    whole = compare(service, *ids)
    chunk = bytes_of(after["model/3"])[: CHUNKS.cut_bytes]
    copied(service, chunk)
    primary = attached(service, StoreRole.PRIMARY).store
    lost, real = {key_of(service, chunk)}, primary.open_read

    def silent(key: ObjectKey) -> Iterator[bytes]:
        if key in lost:
            raise StoreUnavailable("no answer")
        return real(key)

    monkeypatch.setattr(primary, "open_read", silent)
    assert compare(service, *ids) == whole
    lost.add(key_of(service, bytes_of(after["model/5"])[: CHUNKS.cut_bytes]))
    started = start(service, *ids)
    assert reconcile(service.context, kinds=OPERATION_KINDS).again == 1
    assert shown(service, started)["error"] == "no answer", "no store has lost it, so it is not told as damaged"


def test_a_chunk_that_claims_the_same_digest_for_other_bytes_is_not_read(service: RunningService) -> None:
    """Another client of the project may have stated a wrong size, and a copy of that may seem to be there."""
    before, after = large(), large(50)
    ids = pair(service, before, after)
    whole = compare(service, *ids)
    [copy] = copies_of(service, bytes_of(after["model/3"])[: CHUNKS.cut_bytes])
    same = {each.name: getattr(copy, each.name) for each in Copy.__table__.columns if each.name != "id"}
    with service.context.database.transaction() as session:
        real = session.get_one(Chunk, copy.chunk_id)
        claimed = Chunk(
            project_id=real.project_id, digest=real.digest, bytes=real.bytes + 1, created_at=real.created_at
        )
        session.add(claimed)
        session.flush()
        session.add(Copy(**same | {"chunk_id": claimed.id, "generation": "0" * 32, "stored_bytes": real.bytes + 1}))
    assert compare(service, *ids) == whole


def test_a_comparison_is_cancelled_between_two_reads(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "WRITTEN_EVERY_SECONDS", 0.0)
    ids = pair(service, large(), large(50))
    started = start(service, *ids)
    real = compare_values.read_batch

    def cancels(*args: Any) -> Any:
        answer(service.http().post(f"/v1/operations/{started['id']}/cancel"))
        return real(*args)

    monkeypatch.setattr(compare_values, "read_batch", cancels)
    assert reconcile(service.context, kinds=OPERATION_KINDS).cancelled == 1
    assert shown(service, started)["state"] == "cancelled"
    with service.context.database.read() as session:
        assert session.scalar(select(func.count()).select_from(ReadLease)) == 0


def test_who_may_start_one_and_who_may_see_it(service: RunningService) -> None:
    ours = save_tensors(Job(service.http(), "ours/gpt"), 10, {"m/a": random(5)})
    newer = save_tensors(Job(service.http(), "ours/gpt", after=1), 20, {"m/a": random(5, seed=2)})
    theirs = save_tensors(Job(service.http(), "theirs/gpt"), 10, {"m/secret": random(5)})
    operator = service.token(Scope.READ, Scope.OPERATE, project="ours")
    with pytest.raises(Refused, match="403 forbidden"):
        start(service, ours, newer, token=service.token(Scope.READ, project="ours"))
    for one, other in ((theirs, ours), (ours, theirs)):
        with pytest.raises(Refused, match="404 checkpoint_not_found"):
            start(service, one, other, token=operator)
    with pytest.raises(Refused, match="same checkpoint"):
        start(service, ours, ours)
    assert start(service, ours, newer, token=operator)["project"] == "ours"
    both = start(service, theirs, ours)
    assert both["project"] is None
    seen = answer(service.http(token=operator).get("/v1/operations"))["items"]
    assert [each["id"] for each in seen if each["id"] == both["id"]] == [], "it names the other project's tensors"


def test_a_project_has_two_under_way_at_most(service: RunningService) -> None:
    job = Job(service.http())
    ids = [save_tensors(job, step, {"m/a": random(5, seed=step)}) for step in (1, 2, 3, 4)]
    for other in ids[1:3]:
        start(service, ids[0], other)
    start(service, ids[0], ids[1])  # the same, which is not started again
    with pytest.raises(Refused, match=r"429 rate_limited.*2 comparisons of demo are under way"):
        start(service, ids[0], ids[3])
    elsewhere = Job(service.http(), "other/gpt")
    start(service, *(save_tensors(elsewhere, step, {"m/a": random(5, seed=step)}) for step in (1, 2)))
    assert reconcile(service.context, kinds=OPERATION_KINDS).done == 3
    assert compare(service, ids[0], ids[3])["differing"] == 1


def test_a_checkpoint_whose_layout_is_damaged_is_told_by_its_step(service: RunningService, tmp_path: Any) -> None:
    ids = pair(service, {"m/a": random(5)}, {"m/a": random(5, seed=2)})
    layout = answer(service.http().get(f"/v1/checkpoints/{ids[1]}/manifest"))["layout_digest"]
    flip(attached(service, StoreRole.PRIMARY).store, key_of(service, layout))
    started = start(service, *ids)
    reconcile(service.context, kinds=OPERATION_KINDS)
    ended = shown(service, started)
    assert ended["state"] == "failed"
    assert f"The chunk {layout[:12]} cannot be read" in ended["error"]


def test_a_layout_of_more_ranks_than_have_saved_is_told_and_is_no_bug(service: RunningService) -> None:
    """What a trainer signs is a stranger's: its layout may speak of shards that are not there."""
    tensors = {"m/a": random(5000)}
    good = save_tensors(Job(service.http()), 10, tensors)
    plans = plans_of(tensors, 2, in_rows, CHUNKS)
    layout, chunks = global_layout(plans), chunks_of(plans[0], tensors)
    save = Job(service.http(), after=1).begin(20)
    index = ShardIndex(SavedAs("demo/gpt", 20, 1), rank=0, layout_digest=layout.digest)
    ordinals = {"layout": len(chunks), "shard": len(chunks) + 1}
    components = {"m": {"kind": "model", "logical_bytes": sum(map(len, chunks))}}
    save.write(0, [*chunks, layout.encode(), index.encode()], index=ordinals, components=components)
    started = start(service, good, save.id)
    reconcile(service.context, kinds=OPERATION_KINDS)
    ended = shown(service, started)
    assert ended["state"] == "failed"
    assert "its layout is of 2 ranks, and 1 saved it" in ended["error"]


def test_index_documents_are_read_a_few_at_a_time(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all ranks may be more than a worker has memory for."""
    monkeypatch.setattr(service_reader, "_DOCUMENTS_AT_ONCE_BYTES", 1)
    before, after = {"m/a": random(5000)}, {"m/a": random(5000, seed=2)}
    ids = pair(service, before, after, ranks=(3, 2), cuts=(in_rows, in_rows))
    at_once = []
    real = ChunkReader.read

    def counted(reader: ChunkReader, side: int, wanted: Any, tell: Any) -> Any:
        at_once.append(len(wanted))
        return real(reader, side, wanted, tell)

    monkeypatch.setattr(ChunkReader, "read", counted)
    [found] = compare(service, *ids)["tensors"]
    check(found, before["m/a"], after["m/a"])
    assert at_once[:7] == [1] * 7, "two layouts and five indexes"
