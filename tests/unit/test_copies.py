"""What a policy of copies asks for, and whether a layout's pieces cover its tensors. Pure."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from holdfast_protocol.base import body_for
from holdfast_protocol.copies import CopyPolicy, DrillResult
from holdfast_protocol.index_documents import Layout, Piece, Segment, ShardLayout, TensorEntry, tiles
from holdfast_protocol.policies.policy import PolicyError, PolicyKind, read_policy
from holdfast_protocol.policies.retention import KeepBest
from holdfast_protocol.restores import ReadChunks
from holdfast_protocol.states import CheckpointKind, StoreRole
from holdfast_service.lineage.best_and_proven import best_of
from holdfast_service.replicate.policy import Facts, wants


def facts(name: str, step: int = 7, kind: str = "periodic", loss: Any = None, labels: tuple[str, ...] = ()) -> Facts:
    return Facts(name, step, kind, labels, {} if loss is None else {"loss": {"value": loss}})


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (CopyPolicy(), {"plain", "milestone", "thousandth", "final", "best"}),
        (CopyPolicy(labels=["milestone", "release"]), {"milestone"}),
        (CopyPolicy(kinds=[CheckpointKind.FINAL]), {"final"}),
        (CopyPolicy(every_steps=1000), {"thousandth"}),
        (CopyPolicy(best=KeepBest(metric="loss"), every_steps=1000), {"best", "thousandth"}),
    ],
)
def test_a_policy_asks_for_what_meets_one_of_its_conditions(policy: CopyPolicy, wanted: set[str]) -> None:
    run = [
        facts("plain", loss=2.0),
        facts("milestone", labels=("milestone",)),
        facts("thousandth", step=3000),
        facts("final", kind="final"),
        facts("best", loss=1.0),
    ]
    best = best_ids(policy.best, run) if policy.best else frozenset()
    assert {each.checkpoint_id for each in run if wants(policy, each, best)} == wanted


def best_ids(rule: KeepBest, newest_first: list[Facts]) -> frozenset[str]:
    return frozenset(each.checkpoint_id for each in best_of(newest_first, rule, rule.n))


@pytest.mark.rule("finite-metrics")
def test_the_best_are_finite_and_healthy_and_of_equal_ones_the_newest() -> None:
    run = [Facts("nan", 9, "periodic", (), {"loss": {"value": None, "nonfinite": "nan"}})]
    run.append(replace(facts("diverged", step=3, loss=0.1), healthy=False))
    run += [facts("new", step=2, loss=1.0), facts("old", step=1, loss=1.0), facts("worse", loss=3.0), facts("none")]
    assert best_ids(KeepBest(metric="loss"), run) == {"new"}
    assert best_ids(KeepBest(metric="loss", mode="max", n=2), run) == {"worse", "new"}


def test_a_mistyped_policy_is_refused_with_what_was_meant() -> None:
    with pytest.raises(PolicyError, match="did you mean labels"):
        read_policy(PolicyKind.COPIES, {"label": ["milestone"]})


def test_objectives_say_something() -> None:
    with pytest.raises(PolicyError, match="Give rpo_seconds, rto_seconds or both"):
        read_policy(PolicyKind.OBJECTIVES, {})
    with pytest.raises(PolicyError, match="rto_seconds"):
        read_policy(PolicyKind.OBJECTIVES, {"rto_seconds": 0})


@pytest.mark.parametrize(
    ("objectives", "missed"),
    [
        ({}, []),
        ({"rto_objective_seconds": 90, "rpo_objective_seconds": 60}, []),
        ({"rto_objective_seconds": 89, "rpo_objective_seconds": 60}, ["RTO"]),
        ({"rto_objective_seconds": 1, "rpo_objective_seconds": 1}, ["RTO", "RPO"]),
    ],
)
def test_a_drill_names_the_objectives_that_it_misses(objectives: dict[str, float], missed: list[str]) -> None:
    of = {"project": "demo", "run": "gpt", "store": "second", "checkpoint_id": "ck", "step": 1, "attempt": 1}
    counts = dict.fromkeys(
        ("logical_bytes", "tensors", "chunks", "bytes", "stored_bytes", "newest_step", "rpo_steps"), 1
    )
    times = {"seconds": 90.0, "bytes_per_second": 1.0, "rpo_seconds": 60.0}
    assert DrillResult.model_validate({**of, **counts, **times, **objectives, "skipped": []}).missed == missed


@pytest.mark.parametrize(
    ("shape", "boxes", "whole"),
    [
        ((), [((), ())], True),
        ((0, 3), [], True),
        ((4,), [], False),
        ((4,), [((0,), (2,)), ((2,), (2,))], True),
        ((4,), [((0,), (3,)), ((2,), (2,))], False),  # an element twice
        ((4,), [((0,), (2,)), ((3,), (1,))], False),
        ((4,), [((0,), (3,)), ((1,), (2,))], False),  # as many elements as it has, and one of them missing
        ((2, 2), [((0, 0), (1, 2)), ((1, 0), (1, 1))], False),
        ((2, 2), [((0, 0), (1, 2)), ((0, 0), (2, 1)), ((1, 1), (1, 1))], False),
        ((2, 2), [((0, 0), (1, 2)), ((1, 0), (1, 1)), ((1, 1), (1, 1)), ((0, 0), (1, 2))], True),
        ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))], True),
        ((2, 4), [((0, 0), (2, 3)), ((0, 1), (2, 1))], False),
    ],
)
def test_boxes_cover_a_tensor_or_they_do_not(
    shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], whole: bool
) -> None:
    assert tiles(shape, boxes) is whole


def test_a_tensor_with_a_hole_is_named_and_a_tie_is_where_its_target_is() -> None:
    entry = TensorEntry("model", "float32", (4,), replicated=False)
    tied = TensorEntry("model", "float32", (4,), replicated=False, alias_of="whole")
    whole = Piece("whole", (0,), (4,), (Segment(0, 0, 16),))
    half = Piece("torn", (0,), (2,), (Segment(0, 16, 8),))
    layout = Layout(
        1, {"whole": entry, "tied": tied, "torn": entry, "lost": entry}, (ShardLayout((24,), (whole, half)),)
    )
    assert layout.torn() == "torn"
    assert Layout(1, {"whole": entry, "tied": tied}, (ShardLayout((24,), (whole,)),)).torn() is None


@pytest.mark.rule("protocol-version")
def test_a_read_leaves_out_what_an_older_service_does_not_know() -> None:
    request = ReadChunks(digests=["a" * 64], avoid_stores=[StoreRole.PRIMARY], shard=3)
    sent = {minor: set(json.loads(body_for(minor, request))) for minor in (1, 2, 6, 7)}
    oldest = {"digests", "lease_id", "mount_proof"}
    assert sent[1] == oldest
    assert sent[2] == sent[6] == oldest | {"other_mount_proofs", "avoid_stores"}
    assert sent[7] == sent[6] | {"shard"}
