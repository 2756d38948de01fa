"""Hosts of one job, here loopback addresses: what several of them want of a checkpoint leaves the store once. It is
counted in front of the store."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import threading
import time
import uuid
from collections import Counter
from urllib.parse import urlsplit

import pytest
import torch
from gloo import run_ranks
from tests.support.fault_proxy import fault_proxy
from tests.support.node_agent import agent_serve
from tests.support.serve import holdfast_serve
from tests.trainer.test_shared_fetch import SIZES, fetches, left_in, model, whole
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.restore import checkpoint_reader
from holdfast_client.chunks import host_chunks, peer_http, peers, transfer
from holdfast_client.client import Client
from holdfast_protocol.runs import EditProject


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


def on_its_host(rank, ranks_of_a_host, *, patience_seconds=100.0):
    """This process is on one of several hosts from here on. A crowded machine answers late."""
    host = rank // ranks_of_a_host
    socket.gethostname = lambda: f"host{host}"
    os.environ["HOLDFAST_SWARM"] = "true"
    os.environ["HOLDFAST_SWARM_ADDRESS"] = f"127.0.0.{host + 2}"
    peer_http.CONNECT_SECONDS = peer_http.SILENCE_SECONDS = patience_seconds
    peers.LONGEST_WAIT_SECONDS = patience_seconds
    host_chunks.LONGEST_WAIT_SECONDS = patience_seconds


def sharded(seed):
    return fully_shard(model(seed), mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))


def replicas_of_shards(seed):
    """HSDP: the two ranks of a host shard, and each host has a replica."""
    hosts = [[rank, rank + 1] for rank in range(0, torch.distributed.get_world_size(), 2)]
    return fully_shard(model(seed), mesh=DeviceMesh("cpu", hosts, mesh_dim_names=("replicate", "shard")))


def save(rank, run, build=model):
    with holdfast.Checkpointer(run, create=True, chunk_sizes=SIZES) as ckpt:
        step = ckpt.restore({"model": build(0)})
        module = build(step + 1)
        ckpt.save(step, {"model": module}).committed.result(timeout=60)
    return whole(module)


def restore_here(run, build=model, **how):
    module = build(99)
    with holdfast.Checkpointer(run) as ckpt:
        start = ckpt.restore({"model": module}, **how)
    return start, whole(module)


def restore(rank, run, ranks_of_a_host, build=model):
    on_its_host(rank, ranks_of_a_host)
    return restore_here(run, build)


@pytest.fixture
def s3_run(seaweedfs, tmp_path, cache, monkeypatch):
    """A run whose chunks are in S3, and what counts in front of it."""
    real = urlsplit(seaweedfs.endpoint)
    with fault_proxy(real.port) as counting:
        store = seaweedfs.store_url_for(f"swarm-{uuid.uuid4().hex[:8]}").replace(f":{real.port}", f":{counting.port}")
        settings = {"HOLDFAST_STORE": store, **seaweedfs.environment}
        with holdfast_serve(tmp_path, other_settings=settings) as running:
            for name, value in running.environment.items():
                monkeypatch.setenv(name, value)
            with Client() as client:
                project = client.projects.edit(f"p{uuid.uuid4().hex}", EditProject())
                client.runs.create(project.name, "run")
            yield f"{project.name}/run", counting


def gets(counting):
    """How often the ranks got each chunk from the bucket. The service reads copies back beside them, to prove them."""
    key = re.compile(r"/chunks/[0-9a-f]{2}/([0-9a-f]{64})/")
    by_ticket = [seen for seen in counting.seen if seen.method == "GET" and seen.by_url]
    return Counter(found[1] for seen in by_ticket if (found := key.search(seen.path)))


def test_eight_hosts_with_the_same_state_take_each_chunk_from_a_real_s3_server_once(s3_run, cache):
    run, counting = s3_run
    saved = run_ranks(save, 2, run)
    counting.heal()
    assert run_ranks(restore, 16, run, 2, timeout_seconds=300) == [(1, saved[0])] * 16
    assert len(gets(counting)) > 6
    assert set(gets(counting).values()) == {1}
    assert left_in(cache) == []


def test_replicas_of_shards_on_several_hosts_take_each_chunk_from_the_store_once(proxy, cache, run):
    saved = run_ranks(save, 4, run, replicas_of_shards)
    proxy.heal()
    results = run_ranks(restore, 8, run, 2, replicas_of_shards, timeout_seconds=300)
    assert results == [(1, saved[0])] * 8
    assert set(fetches(proxy).values()) == {1}


def test_what_resharding_cuts_for_several_hosts_leaves_the_store_once(proxy, cache, run):
    saved = run_ranks(save, 2, run, sharded)
    proxy.heal()
    assert run_ranks(restore, 3, run, 1, sharded, timeout_seconds=300) == [(1, saved[0])] * 3
    assert set(fetches(proxy).values()) == {1}
    assert left_in(cache) == []


def restore_and_listen(rank, run, ranks_of_a_host, build):
    """How often the ranks were asked for chunks."""
    on_its_host(rank, ranks_of_a_host)
    asked = []
    find = peers.PeerServer.find
    peers.PeerServer.find = lambda *a: (asked.append(a[1]), find(*a))[1]
    return restore_here(run, build), len(asked)


def test_what_each_host_wants_alone_goes_no_way_but_from_the_store(proxy, cache, run):
    saved = run_ranks(save, 3, run, sharded)
    proxy.heal()
    results = run_ranks(restore_and_listen, 3, run, 1, sharded, timeout_seconds=300)
    assert [result for result, _ in results] == [(1, saved[0])] * 3
    assert set(fetches(proxy).values()) == {1}
    assert sum(asked for _, asked in results) == 0


def restore_and_tell(rank, run):
    on_its_host(rank, 1)
    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logging.getLogger("holdfast").addHandler(Keep())
    return restore_here(run), [line for line in lines if line.startswith("resumed")]


def test_the_line_of_the_restore_tells_what_was_passed_on(proxy, cache, run):
    saved = run_ranks(save, 1, run)
    (result, [line]), *_ = run_ranks(restore_and_tell, 2, run)
    assert result == (1, saved[0])
    told = re.search(r"([\d.]+) kB read and verified \(([\d.]+) kB passed on from host to host\)", line)
    assert float(told[2]) == pytest.approx(float(told[1]) / 2, abs=1), line


def restore_without(rank, run):
    on_its_host(rank, 1)
    del os.environ["HOLDFAST_SWARM"]
    peers.PeerServer.__init__ = checkpoint_reader.wanted_bits = None
    return restore_here(run)


def test_unless_it_is_wanted_no_rank_listens_or_says_what_it_wants_and_each_host_reads_for_itself(proxy, cache, run):
    saved = run_ranks(save, 1, run)
    proxy.heal()
    assert run_ranks(restore_without, 2, run) == [(1, saved[0])] * 2
    assert set(fetches(proxy).values()) >= {2}
    assert not cache.exists()


def restore_on_one_host(rank, run):
    on_its_host(rank, 2)
    peers.PeerServer.__init__ = None
    return restore_here(run)


def test_a_job_on_one_host_makes_no_server(proxy, cache, run):
    saved = run_ranks(save, 2, run)
    assert run_ranks(restore_on_one_host, 2, run) == [(1, saved[0])] * 2


def restore_where_one_takes_no_part(rank, run):
    on_its_host(rank, 1)
    if rank == 1:
        os.environ["HOLDFAST_MAX_BYTES_PER_SECOND"] = str(10**9)
    if rank == 2:
        os.environ["HOLDFAST_SWARM_ADDRESS"] = "192.0.2.1"  # no address of this machine
    return restore_here(run)


def test_hosts_that_take_no_part_read_for_themselves(proxy, cache, run):
    saved = run_ranks(save, 1, run)
    proxy.heal()
    assert run_ranks(restore_where_one_takes_no_part, 4, run) == [(1, saved[0])] * 4
    assert 3 in set(fetches(proxy).values()), "two alone, and one of the two that share"
    assert max(fetches(proxy).values()) == 3


def restore_counting_files(rank, run):
    on_its_host(rank, 1)
    read, read_file = [], transfer.read_file
    transfer.read_file = lambda *a, **k: (read.append(a[2]), read_file(*a, **k))[1]
    return restore_here(run), read


def test_files_of_a_mounted_store_are_read_by_one_host_too(service, cache, run):
    saved = run_ranks(save, 1, run)
    results = run_ranks(restore_counting_files, 3, run)
    assert [result for result, _ in results] == [(1, saved[0])] * 3
    read = Counter(digest for _, digests in results for digest in digests)
    assert len(read) > 6
    assert set(read.values()) == {1}


def lie(self, descriptor, start, size):
    self.request.sendall(bytes(size))


def restore_with_bad_peers(rank, run, folder):
    """Rank 2, on the second host, lies. Rank 4, on the third, stands still when another host asks it for a chunk, until
    all others have read. It waits until all have begun to read: before, they meet, and a collective goes through it."""
    on_its_host(rank, 2, patience_seconds=2.0)
    if rank == 2:
        peers._Request.send_range = lie
    if rank == 4:
        find = peers.PeerServer.find

        def stand_still(server, digest):
            while sum(1 for _ in folder.glob("begun-*")) < 8:
                time.sleep(0.01)
            (folder / f"stalled-{os.getpid()}").touch()  # another thread of this process may stop it at any time
            os.kill(os.getpid(), signal.SIGSTOP)
            return find(server, digest)

        peers.PeerServer.find = stand_still
    read = checkpoint_reader.CheckpointSource.read

    def read_and_say(*a, **k):
        (folder / f"begun-{rank}").touch()
        fetched = read(*a, **k)
        (folder / f"read-{rank}").touch()
        return fetched

    checkpoint_reader.CheckpointSource.read = read_and_say
    return restore_here(run)


def test_a_peer_that_lies_and_one_that_stands_still_change_nothing_but_the_time(proxy, cache, run, tmp_path):
    saved = run_ranks(save, 2, run)
    folder = tmp_path / "told"
    folder.mkdir()
    ended = threading.Event()

    def wake_it_up():
        while not ended.wait(0.05):
            if sum(1 for _ in folder.glob("read-*")) >= 7:
                for stalled in folder.glob("stalled-*"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(stalled.name.partition("-")[2]), signal.SIGCONT)

    watcher = threading.Thread(target=wake_it_up)
    watcher.start()
    try:
        results = run_ranks(restore_with_bad_peers, 8, run, folder, timeout_seconds=300)
    finally:
        ended.set()
        watcher.join(60)
    assert results == [(1, saved[0])] * 8
    assert list(folder.glob("stalled-*"))
    assert left_in(cache) == []


def save_with_optimizer(rank, run):
    module = model(1)
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with holdfast.Checkpointer(run, create=True, chunk_sizes=SIZES) as ckpt:
        ckpt.restore({"model": module, "optimizer": optimizer})
        ckpt.save(0, {"model": module, "optimizer": optimizer}).committed.result(timeout=60)
    return whole(module), json.dumps(optimizer.state_dict(), default=torch.Tensor.tolist)


def restore_streamed(rank, run):
    on_its_host(rank, 1)
    module = model(99)
    optimizer = torch.optim.AdamW(module.parameters())
    with holdfast.Checkpointer(run) as ckpt:
        ckpt.restore({"model": module, "optimizer": optimizer}, stream=True)
        ckpt.wait_for_rest()
    return whole(module), json.dumps(optimizer.state_dict(), default=torch.Tensor.tolist)


def test_the_rest_of_a_streamed_restore_is_passed_on_too(proxy, cache, run):
    [saved] = run_ranks(save_with_optimizer, 1, run)
    proxy.heal()
    assert run_ranks(restore_streamed, 3, run) == [saved] * 3
    assert set(fetches(proxy).values()) == {1}
    assert left_in(cache) == []


def save_and_fail(rank, run, agent):
    with contextlib.suppress(ZeroDivisionError):
        with holdfast.Checkpointer(run, create=True, chunk_sizes=SIZES, agent=agent) as ckpt:
            ckpt.restore({})
            ckpt.save(0, {"model": model(1)}).committed.result(timeout=60)
            raise ZeroDivisionError
    return whole(model(1))


def restore_on_a_host_with_the_state_in_memory_and_one_without(rank, run, agent):
    if rank == 0:
        os.environ["HOLDFAST_AGENT"] = str(agent)
    return restore_and_listen(rank, run, 1, model)


def test_a_host_that_has_the_state_in_memory_owns_nothing_and_no_host_waits_for_it(proxy, cache, run, tmp_path):
    with agent_serve(tmp_path / "agent.log") as agent:
        saved = run_ranks(save_and_fail, 2, run, agent.socket)
        proxy.heal()
        results = run_ranks(
            restore_on_a_host_with_the_state_in_memory_and_one_without, 2, run, agent.socket, timeout_seconds=300
        )
    assert results == [((1, saved[0]), 0)] * 2
    assert set(fetches(proxy).values()) == {1}
