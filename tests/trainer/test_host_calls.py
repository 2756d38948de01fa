"""The ranks of one host begin and seal each save in one call of the service."""

from __future__ import annotations

import time
from collections import Counter

import httpx
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo import run_ranks
from prometheus_client.parser import text_string_to_metric_families
from tests.support.training import Job

import holdfast
from holdfast_client import host_calls

BEGIN = "POST /v1/projects/{project}/runs/{run}/checkpoints"
SEAL = "PUT /v1/checkpoints/{checkpoint_id}/shards/{rank}"
SEAL_TOGETHER = "PUT /v1/checkpoints/{checkpoint_id}/shards"
SAVES = 3


def requests(service):
    token = service.client.settings.find_token().get_secret_value()
    reply = httpx.get(f"{service.served.url}/metrics", headers={"Authorization": f"Bearer {token}"})
    counted = Counter()
    for family in text_string_to_metric_families(reply.raise_for_status().text):
        for sample in family.samples:
            if sample.name == "holdfast_requests_total":
                counted[f"{sample.labels['method']} {sample.labels['route']}"] += int(sample.value)
    return counted


def save(rank, run, settings):
    """On a crowded machine too each rank is waited for, and no leader is taken for a silent one."""
    host_calls.BEGIN_WINDOW_SECONDS = host_calls.SEAL_WINDOW_SECONDS = host_calls.SILENCE_SECONDS = 60.0
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True, **settings) as ckpt:
        ckpt.restore(job.state)
        dist.barrier()
        for step in range(SAVES):
            job.step(step)
            ckpt.save(step, job.state).committed.result(timeout=60)
        return ckpt.restore(job.state)


@pytest.mark.parametrize(("ranks", "spooled"), [(4, False), (2, True)])
def test_the_ranks_of_a_host_make_one_begin_and_one_seal_per_save(run, service, tmp_path, ranks, spooled):
    before = requests(service)
    settings = {"local": str(tmp_path)} if spooled else {}
    assert run_ranks(save, ranks, run, settings) == [SAVES] * ranks
    made = requests(service) - before
    assert (made[BEGIN], made[SEAL_TOGETHER], made[SEAL]) == (SAVES, SAVES, 0)
    assert [view.missing_ranks for view in service.client.checkpoints.all(*run.split("/"))] == [[]] * SAVES


def save_each_alone(rank, run):
    """The leader of the host takes no calls; the second rank finds out at its first save."""
    job = Job(rank, "ddp")
    with holdfast.Checkpointer(run, create=True) as ckpt:
        if rank == 0:
            ckpt.parts.pipeline.host_calls.close()
        ckpt.restore(job.state)
        return [ckpt.save(step, job.state).committed.result(timeout=60).step for step in range(SAVES)]


def test_without_its_leader_each_rank_calls_alone(run, service):
    before = requests(service)
    assert run_ranks(save_each_alone, 2, run) == [[*range(SAVES)]] * 2
    made = requests(service) - before
    assert (made[BEGIN], made[SEAL_TOGETHER], made[SEAL]) == (2 * SAVES, 0, 2 * SAVES)


def save_by_dcp(rank, run):
    with holdfast.Checkpointer(run, create=True) as ckpt:
        ckpt.restore({})
        for step in range(SAVES):
            dcp.save({"mine": torch.full((4,), float(rank))}, storage_writer=ckpt.writer(step))


def test_dcp_save_waits_for_no_rank_of_its_host(run, service):
    """The coordinator seals after all others, and training stands meanwhile: who waited would wait in vain."""
    before = requests(service)
    run_ranks(save_by_dcp, 2, run)
    made = requests(service) - before
    assert (made[BEGIN], made[SEAL_TOGETHER], made[SEAL]) == (2 * SAVES, 0, 2 * SAVES)


def end_while_it_waits(rank, run):
    host_calls.SEAL_WINDOW_SECONDS = 60.0
    job = Job(rank, "ddp")
    ckpt = holdfast.Checkpointer(run, create=True)
    pipeline = ckpt.parts.pipeline
    if rank == 1:
        pipeline.host_calls.close()  # it calls alone, so the leader waits for it in vain
    ckpt.restore(job.state)
    dist.barrier()
    handle = ckpt.save(0, job.state)
    if rank == 0:
        while not any(key.startswith("ck_") for key in pipeline.host_calls._open):
            time.sleep(0.01)
        pipeline.close(drain_seconds=0)
    else:
        handle.committed.result(timeout=60)
    dist.barrier()
    ckpt.close()


def test_a_seal_that_waits_for_other_ranks_counts_when_the_job_ends(run, service):
    run_ranks(end_while_it_waits, 2, run)
    assert [view.state for view in service.client.checkpoints.all(*run.split("/"))] == ["committed"]
