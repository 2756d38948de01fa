"""Ranks of one host: what several of them want of a checkpoint is fetched once, through a proxy that counts."""

from __future__ import annotations

import base64
import errno
import os
import re
import signal
from collections import Counter

import pytest
import torch
from gloo import run_ranks
from tests.support.fault_proxy import fault_proxy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.layout.plan import ChunkSizes
from holdfast.restore import checkpoint_reader as host_sharing
from holdfast_client.local.chunk_folder import ChunkFolder

SIZES = ChunkSizes(own_chunk_bytes=4096, cut_bytes=8192, pack_bytes=4096)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("HOLDFAST_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def proxy(service, cache, monkeypatch):
    """Everything goes over HTTP, and through it."""
    with fault_proxy(int(service.served.url.rpartition(":")[2])) as running:
        monkeypatch.setenv("HOLDFAST_URL", running.url)
        monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")
        yield running


def fetches(proxy) -> Counter[str]:
    """How often each chunk was got."""
    digests: Counter[str] = Counter()
    for seen in proxy.seen:
        if "get" in seen.calls:
            terms = base64.urlsafe_b64decode(seen.path.rpartition("/")[2] + "==")
            digests[re.search(rb"/([0-9a-f]{64})/", terms)[1].decode()] += 1
    return digests


def left_in(cache):
    """What the jobs have left in their folder."""
    return [path for top in cache.glob("*") for path in top.iterdir()]


def model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 37))


def sharded(seed):
    return fully_shard(model(seed), mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))


def whole(module):
    return [
        (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().tolist()
        for value in module.state_dict().values()
    ]


def save(rank, run, steps=1, build=model):
    with holdfast.Checkpointer(run, create=True, chunk_sizes=SIZES) as ckpt:
        start = ckpt.restore({"model": build(0)})
        for step in range(start, start + steps):
            module = build(step + 1)
            ckpt.save(step, {"model": module}).committed.result(timeout=60)
    return whole(module)


def restore(rank, run, build=model):
    module = build(99)
    with holdfast.Checkpointer(run) as ckpt:
        start = ckpt.restore({"model": module})
        assert ckpt.progress is None
    return start, whole(module)


def test_two_ranks_with_the_same_state_fetch_each_chunk_once(proxy, cache, run):
    saved = run_ranks(save, 2, run)
    proxy.heal()
    assert run_ranks(restore, 2, run) == [(1, saved[0])] * 2
    assert len(fetches(proxy)) > 6
    assert set(fetches(proxy).values()) == {1}
    assert left_in(cache) == []


def test_a_chunk_that_resharding_cuts_is_fetched_once_for_all_who_want_a_part(proxy, cache, run):
    saved = run_ranks(save, 2, run, 1, sharded)
    proxy.heal()
    assert run_ranks(restore, 3, run, sharded) == [(1, saved[0])] * 3
    assert set(fetches(proxy).values()) == {1}
    assert left_in(cache) == []


def test_switched_off_each_rank_fetches_for_itself(proxy, cache, run, monkeypatch):
    saved = run_ranks(save, 2, run)
    monkeypatch.setenv("HOLDFAST_CACHE_BYTES", "0")
    proxy.heal()
    assert run_ranks(restore, 2, run) == [(1, saved[0])] * 2
    assert Counter(fetches(proxy).values())[2] > 4
    assert not cache.exists()


def test_a_limit_that_nothing_fits_in_costs_fetches_and_nothing_else(proxy, cache, run, monkeypatch):
    saved = run_ranks(save, 2, run)
    monkeypatch.setenv("HOLDFAST_CACHE_BYTES", "100")
    assert run_ranks(restore, 2, run) == [(1, saved[0])] * 2
    assert left_in(cache) == []


def test_a_folder_that_cannot_be_made_costs_fetches_and_nothing_else(proxy, cache, run):
    saved = run_ranks(save, 2, run)
    cache.mkdir()
    (cache / f"holdfast-{os.geteuid()}").write_text("a file where the folder should be")
    assert run_ranks(restore, 2, run) == [(1, saved[0])] * 2


def restore_without_temporary_folder(rank, run):
    def gettempdir():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    host_sharing.tempfile.gettempdir = gettempdir
    return restore(rank, run)


def test_a_host_without_a_temporary_folder_costs_fetches_and_nothing_else(proxy, run, monkeypatch):
    saved = run_ranks(save, 2, run)
    monkeypatch.delenv("HOLDFAST_CACHE_DIR")
    assert run_ranks(restore_without_temporary_folder, 2, run) == [(1, saved[0])] * 2


def restore_elsewhere(rank, run):
    """Rank 1 does not see rank 0's disk, as in a container of its own."""
    if rank == 1:
        host_sharing.job_folder_in_use = lambda path: open("/nowhere/at/all")
    return restore(rank, run)


def test_a_rank_that_does_not_see_the_hosts_folder_fetches_for_itself(proxy, cache, run):
    saved = run_ranks(save, 2, run)
    proxy.heal()
    assert run_ranks(restore_elsewhere, 2, run) == [(1, saved[0])] * 2
    assert Counter(fetches(proxy).values())[2] > 4
    assert left_in(cache) == []


def restore_counting_copies(rank, run):
    added = []
    add = ChunkFolder.add
    ChunkFolder.add = lambda *a, **k: (added.append(a[1]), add(*a, **k))[1]
    return restore(rank, run), len(added)


def test_files_of_a_mounted_store_are_read_where_they_are_and_not_copied(service, cache, run):
    saved = run_ranks(save, 2, run)
    with fault_proxy(int(service.served.url.rpartition(":")[2])) as proxy:
        os.environ["HOLDFAST_URL"] = proxy.url
        assert run_ranks(restore_counting_copies, 2, run) == [((1, saved[0]), 0)] * 2
    assert fetches(proxy) == {}
    assert left_in(cache) == []


def test_a_lone_rank_makes_no_folder(proxy, cache, run):
    saved = run_ranks(save, 1, run)
    assert run_ranks(restore, 1, run) == [(1, saved[0])]
    assert not cache.exists()


def damage(service, run):
    """One chunk that only the newest checkpoint has, and none of its documents."""
    newest, before = list(service.client.checkpoints.all(*run.split("/")))[:2]

    def digests(view):
        return {
            c.digest
            for rank in range(view.world_size)
            for c in service.client.checkpoints.shard_chunks(view.id, rank).chunks
        }

    documents = {shard.index_digest for shard in service.client.checkpoints.manifest(newest.id).shards}
    wrong = sorted(digests(newest) - digests(before) - documents)[0]
    for path in service.store.glob(f"**/{wrong}/*"):
        path.chmod(0o600)
        path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.rule("one-vote-per-step")
def test_a_damaged_chunk_is_shared_with_nobody_and_both_ranks_take_the_point_before(proxy, cache, service, run):
    run_ranks(save, 2, run)
    before = run_ranks(restore, 2, run)
    run_ranks(save, 2, run)
    damage(service, run)
    assert run_ranks(restore, 2, run) == before
    assert left_in(cache) == []


def restore_nothing(rank, run):
    with holdfast.Checkpointer(run) as ckpt:
        try:
            ckpt.restore({"model": model(99)}, at="1")
        except (holdfast.errors.IntegrityError, holdfast.errors.ChunkGone) as error:
            return type(error).__name__
    return "restored"


def test_a_restore_that_fails_leaves_no_folder(proxy, cache, service, run):
    run_ranks(save, 2, run, 2)
    damage(service, run)
    assert "restored" not in run_ranks(restore_nothing, 2, run)
    assert left_in(cache) == []


def restore_until_killed(rank, run):
    """Rank 0 dies with the lock of the first chunk that it is about to fetch, and with the folder that it made."""
    if rank == 0:
        ChunkFolder.size = lambda *a: None
        ChunkFolder.read_into = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
    return restore(rank, run)


def test_a_rank_that_is_killed_while_it_shares_holds_up_nobody_and_the_next_job_sweeps(proxy, cache, run):
    saved = run_ranks(save, 2, run)
    with pytest.raises(AssertionError, match="rank 0: died with exit code -9"):
        run_ranks(restore_until_killed, 2, run)
    assert len(left_in(cache)) == 1
    assert run_ranks(restore, 2, run) == [(1, saved[0])] * 2
    assert left_in(cache) == []


def weights(rank, run):
    module = model(99)
    holdfast.load_weights(f"{run}@latest", module)
    return whole(module)


def test_weights_of_another_run_are_fetched_once_too(proxy, cache, run):
    saved = run_ranks(save, 2, run)
    proxy.heal()
    assert run_ranks(weights, 2, run) == [saved[0]] * 2
    assert set(fetches(proxy).values()) == {1}
    assert left_in(cache) == []


def test_a_relaunch_on_the_same_node_reads_every_byte_from_its_local_tier(proxy, cache, run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_LOCAL_DIR", str(tmp_path / "local"))
    saved = run_ranks(save, 2, run)
    proxy.heal()
    assert run_ranks(restore, 2, run) == [(1, saved[0])] * 2
    assert fetches(proxy) == {}
    assert not cache.exists()
    for path in (tmp_path / "local").glob("[0-9a-f][0-9a-f]/*"):
        path.unlink()
    assert run_ranks(restore, 2, run) == [(1, saved[0])] * 2
    assert set(fetches(proxy).values()) == {1}, "what is no longer there is fetched once"
