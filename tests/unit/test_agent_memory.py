"""Memory that a rank shares with its node's agent: it cannot be cut off under a reader, and limits are seen in time."""

from __future__ import annotations

import os

import pytest

from holdfast_client.agent import shared_memory
from holdfast_client.agent.shared_memory import (
    Budget,
    SharedMemory,
    UnusableMemory,
    container_room_bytes,
    map_of,
    shares_container,
    untouched_bytes,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="agents need Linux")
PAGE = 4096


def test_what_is_written_is_read_by_the_other_mapping_also_after_the_writer_let_go():
    memory = SharedMemory(4 * PAGE)
    theirs = map_of(memory.descriptor, 4 * PAGE)
    memory.map[5:8] = b"abc"
    memory.close()
    memory.close()
    assert theirs[5:8] == b"abc"
    with pytest.raises(TypeError):
        theirs[0:1] = b"x"


@pytest.mark.parametrize("refuses", [PermissionError(13, "none that could be executed"), OSError(22, "what is 8?")])
def test_a_hardened_host_and_an_older_kernel_give_memory_too(refuses, monkeypatch):
    create, knows = os.memfd_create, isinstance(refuses, PermissionError)

    def of_kernel(name, flags):
        if bool(flags & 8) != knows:
            raise refuses
        return create(name, flags & ~8)

    monkeypatch.setattr(os, "memfd_create", of_kernel)
    SharedMemory(PAGE).close()


def test_memory_cannot_be_cut_off_under_a_reader():
    memory = SharedMemory(4 * PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, PAGE)
    memory.close()


def test_memory_that_could_be_cut_off_or_is_too_short_is_refused(tmp_path):
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, PAGE)
    with pytest.raises(UnusableMemory, match="cut off"):
        map_of(loose, PAGE)
    os.close(loose)
    memory = SharedMemory(PAGE)
    with pytest.raises(UnusableMemory, match="too short"):
        map_of(memory.descriptor, 2 * PAGE)
    memory.close()
    (tmp_path / "file").write_bytes(b"x" * PAGE)
    with open(tmp_path / "file", "rb") as file, pytest.raises(UnusableMemory):
        map_of(file.fileno(), PAGE)


def test_only_untouched_pages_need_new_memory():
    memory = SharedMemory(16 * PAGE)
    assert untouched_bytes(memory.descriptor, memory.bytes) == 16 * PAGE
    memory.map[0 : 4 * PAGE] = b"x" * 4 * PAGE
    assert untouched_bytes(memory.descriptor, memory.bytes) == 12 * PAGE
    memory.close()


def test_a_budget_refuses_what_is_over_it_with_the_remedy_and_takes_it_once_there_is_room():
    budget = Budget(10 * PAGE)
    assert budget.take(6 * PAGE, 0) is None
    assert "--memory" in (budget.take(6 * PAGE, 0) or "")
    budget.give_back(6 * PAGE)
    assert budget.take(6 * PAGE, 0) is None


def test_memory_that_the_node_does_not_have_is_refused(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable:   10 kB\n")
    monkeypatch.setattr(shared_memory, "_MEMINFO", tmp_path / "meminfo")
    budget = Budget(10**12)
    assert "host_memory=" in (budget.take(20 * 1024, 20 * 1024) or "")
    assert budget.take(20 * 1024, 4 * 1024) is None, "most of its pages are there already"
    assert shared_memory.default_limit_bytes() == 50 * 1024


def group(folder, most, used, droppable=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {droppable}\nactive_file 7\n")


def test_the_tightest_limit_around_a_container_counts_and_droppable_files_do_not(tmp_path):
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    group(groups / "pod", 1000, 900, 50)
    group(groups / "pod" / "trainer", 5000, 100)
    own.write_text("0::/pod/trainer\n")
    assert container_room_bytes(groups, own) == 150


def test_a_container_that_sees_only_its_own_root_finds_its_limit(tmp_path):
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    group(groups, 700, 100)
    own.write_text("0::/kubepods/burstable/pod1/c1\n")
    assert container_room_bytes(groups, own) == 600


def test_version_1_and_no_limit(tmp_path):
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    folder = groups / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (folder / "memory.usage_in_bytes").write_text("10\n")
    (folder / "memory.stat").write_text("total_inactive_file 3\n")
    own.write_text("5:cpu:/x\n4:memory:/job\n")
    assert container_room_bytes(groups, own) is None
    (folder / "memory.limit_in_bytes").write_text("100\n")
    assert container_room_bytes(groups, own) == 93
    assert container_room_bytes(tmp_path / "none", tmp_path / "nothing") is None


def test_a_process_shares_the_container_if_its_cgroups_are_the_same(tmp_path):
    for name, groups in (("self", "0::/job"), ("1", "0::/job"), ("2", "0::/job/other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup").write_text(groups)
    assert [shares_container(process, tmp_path) for process in range(4)] == [False, True, False, False]
