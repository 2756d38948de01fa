"""A host is lost, with its ranks and its agent: the one that takes its place reads the newest step in the memory of
other hosts' agents. Each is a process of its own, on loopback addresses, and a proxy counts what the store gives."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.support.fault_proxy import SLOW_DOWN, fault_proxy
from tests.support.handing_rank import digest_of, state_of
from tests.support.node_agent import agent_serve
from tests.support.ranks import launched, read_until

from holdfast_client.agent.link import status_of
from holdfast_client.client import Client

RANK = "tests.support.handing_rank"
SIZE = 4 * 1024**2
HOSTS = 4
LOST = 2


@pytest.fixture
def proxy(service, monkeypatch):
    """Everything goes over HTTP, and through it."""
    with fault_proxy(int(service.served.url.rpartition(":")[2])) as running:
        monkeypatch.setenv("HOLDFAST_URL", running.url)
        monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")
        # An agent must not give its save up before the test lets the store take it, however long that is.
        monkeypatch.setenv("HOLDFAST_SAVE_RETRY_SECONDS", "120")
        yield running


@pytest.fixture
def agents(tmp_path):
    """One for each host, and the function that starts one in the place of a lost host's."""
    with ExitStack() as held:

        def on(host, number=0):
            log = tmp_path / f"agent-{host}-{number}.log"
            address = f"127.0.0.{2 + host + HOSTS * number}"
            return held.enter_context(agent_serve(log, "--peers", "1", patient=True, address=address))

        yield [on(host) for host in range(HOSTS)], on


def wait_until(holds):
    until = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def of_ranks(agents):
    return [{"HOST_OF_RANK": f"host{rank}", "HOLDFAST_AGENT": str(agent.socket)} for rank, agent in enumerate(agents)]


def save_and_lose_a_host(run, agents, saves=2):
    """The last step is committed, and the host after each one has a copy of it."""
    with launched(RANK, run, saves, "stays", SIZE, world_size=HOSTS, settings=of_ranks(agents)) as ranks:
        for rank in ranks:
            read_until(rank, f"saved {saves - 1}")
        for host, agent in enumerate(agents):
            copy = saves - 1, (host - 1) % HOSTS
            wait_until(lambda agent=agent, copy=copy: copy in copies_of(agent))
        agents[LOST].process.kill9()
        end_all(ranks[LOST], *ranks)


def end_all(*ranks):
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.wait(timeout=90)


def copies_of(agent, *, committed=True):
    """The steps of its copies, and the hosts that they are of."""
    kept = status_of(agent.socket).kept
    return {(it.step, it.copy_of) for it in kept if it.copy_of is not None and it.is_committed == committed}


def has_seen_its_ranks_end(agent):
    return not any(part.rank_lives for part in status_of(agent.socket).held)


def restored(run, agents):
    """What each rank says of the next step and its state."""
    with launched(RANK, run, 0, "stays", SIZE, world_size=HOSTS, settings=of_ranks(agents)) as ranks:
        return [read_until(rank, "restored")[-1] for rank in ranks]


def all_at(step):
    return [f"restored {step + 1} {digest_of(state_of(step, SIZE))}"] * HOSTS


def test_a_lost_host_and_its_agent_are_replaced_and_the_newest_step_comes_from_memory(run, proxy, agents):
    here, replace = agents
    save_and_lose_a_host(run, here)
    here[LOST] = replace(LOST, 1)
    assert restored(run, here) == all_at(1)
    documents_of_the_lost_rank = 1
    assert proxy.count("get") == documents_of_the_lost_rank


@contextmanager
def step_1_unsent(run, proxy, agents):
    """The ranks, while the store takes nothing: step 0 is committed, step 1 is in the memory of agents alone."""
    with launched(RANK, run, 2, "told", SIZE, world_size=HOSTS, settings=of_ranks(agents)) as ranks:
        save_on_all(ranks, 0)
        wait_until(lambda: all((0, (host - 1) % HOSTS) in copies_of(agent) for host, agent in enumerate(agents)))
        proxy.script(SLOW_DOWN, on="put", times=None)
        save_on_all(ranks, 1)
        wait_until(lambda: (1, LOST) in copies_of(agents[LOST + 1], committed=False))
        yield ranks


def newest_step(run):
    with Client() as client:
        return client.runs.get(*run.split("/")).newest_step


def test_a_save_that_no_host_had_sent_when_one_was_lost_is_committed_from_the_copy_and_restored(run, proxy, agents):
    here, replace = agents
    with step_1_unsent(run, proxy, here) as ranks:
        assert (0, LOST) in copies_of(here[LOST + 1]), "what is committed stays beside it"
        here[LOST].process.kill9()
        end_all(ranks[LOST], *ranks)
    proxy.heal()
    wait_until(lambda: newest_step(run) == 1)
    wait_until(lambda: (1, LOST) in copies_of(here[LOST + 1]))  # it hears of the commit a moment later
    here[LOST] = replace(LOST, 1)
    assert restored(run, here) == all_at(1)
    assert "the agent of another host is gone, and its save is finished here" in here[LOST + 1].log


def test_an_agent_that_is_lost_after_all_ranks_leaves_its_save_to_the_next_launch(run, proxy, agents):
    """While it answers, its save is its own to finish. Nobody watches it any more when it dies."""
    here, replace = agents
    with step_1_unsent(run, proxy, here) as ranks:
        end_all(*ranks)
    wait_until(lambda: all(has_seen_its_ranks_end(agent) for agent in here))
    time.sleep(10)  # then the others ask it, which nothing tells
    here[LOST].process.kill9()
    proxy.heal()
    time.sleep(2)
    assert newest_step(run) == 0
    here[LOST] = replace(LOST, 1)
    assert restored(run, here) == all_at(1)


def test_an_agent_that_is_started_anew_within_a_launch_gets_copies_and_gives_them(run, proxy, agents, tmp_path):
    """Of those that keep a copy and of those that a copy is of: it is both."""
    here, replace = agents
    kept, following = LOST + 1, (LOST + 2) % HOSTS
    with launched(RANK, run, 2, "told", SIZE, world_size=HOSTS, settings=of_ranks(here)) as ranks:
        save_on_all(ranks, 0)
        wait_until(lambda: (0, LOST) in copies_of(here[kept]))
        here[kept].process.kill9()
        address = f"127.0.0.{2 + kept}"
        with agent_serve(
            tmp_path / "anew.log", "--peers", "1", socket=here[kept].socket, patient=True, address=address
        ) as anew:
            wait_until(lambda: "a rank here has named the agents" in anew.log)
            proxy.script(SLOW_DOWN, on="put", times=None)
            save_on_all(ranks, 1)
            wait_until(lambda: (1, LOST) in copies_of(anew, committed=False))
            wait_until(lambda: (1, kept) in copies_of(here[following], committed=False))
            here[LOST].process.kill9()
            end_all(ranks[LOST], *ranks)
            proxy.heal()
            wait_until(lambda: newest_step(run) == 1)
            here[LOST] = replace(LOST, 1)
            assert restored(run, here) == all_at(1)


def save_on_all(ranks, step):
    for rank in ranks:
        rank.stdin.write("save\n")
        rank.stdin.flush()
    for rank in ranks:
        read_until(rank, f"saved {step}")


def test_copies_that_rot_are_refused_and_the_store_gives_those_chunks(run, proxy, agents):
    here, replace = agents
    save_and_lose_a_host(run, here)
    following = here[(LOST + 1) % HOSTS].process.pid
    for memory in Path(f"/proc/{following}/fd").iterdir():
        if os.readlink(memory).startswith("/memfd:holdfast-staging"):
            with open(memory, "r+b", buffering=0) as file:
                file.seek(1000)
                file.write(b"rotten")
    here[LOST] = replace(LOST, 1)
    assert restored(run, here) == all_at(1)
    of_all_hosts = HOSTS * SIZE // 2**18
    assert 1 < proxy.count("get") < of_all_hosts // 2, "not what that agent had given before"
