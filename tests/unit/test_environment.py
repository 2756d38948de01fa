"""What an attempt says of its script's commit, read from the files of a repository, and which facts are compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.session.environment import commit_of, differences, environment

COMMIT, OTHER = "a" * 40, "b" * 64


def test_the_commit_is_found_however_the_repository_keeps_it(tmp_path: Path) -> None:
    git, script = tmp_path / ".git", tmp_path / "jobs" / "gpt"
    script.mkdir(parents=True)
    (git / "refs" / "heads").mkdir(parents=True)
    assert commit_of(script) == {}, "no commit yet"
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text(f"# pack-refs with: peeled\n{OTHER} refs/heads/other\n{COMMIT} refs/heads/main\n")
    assert commit_of(script)["git_commit"] == COMMIT
    (git / "refs" / "heads" / "main").write_text(OTHER + "\n")
    assert commit_of(script)["git_commit"] == OTHER
    (git / "HEAD").write_text(COMMIT)
    assert commit_of(script)["git_commit"] == COMMIT
    (git / "HEAD").write_text("not a commit")
    assert commit_of(script) == {}
    assert commit_of(None) == {}


def test_the_commit_of_a_worktree_is_its_own(tmp_path: Path) -> None:
    tree, own = tmp_path / "tree", tmp_path / "main" / ".git" / "worktrees" / "tree"
    tree.mkdir()
    own.mkdir(parents=True)
    (tree / ".git").write_text(f"gitdir: {own}\n")
    (own / "HEAD").write_text("ref: refs/heads/topic\n")
    (own / "commondir").write_text("../..\n")
    (own.parents[1] / "packed-refs").write_text(f"{COMMIT} refs/heads/topic\n")
    assert commit_of(tree)["git_commit"] == COMMIT


def test_only_what_both_know_and_what_changes_a_training_is_compared() -> None:
    then = {"torch": "2.8.0", "gpu": "NVIDIA H100", "platform": "Linux-5", "python": "3.11.7", "slurm_job": "1"}
    now = {"torch": "2.9.0", "platform": "Linux-6", "python": "3.11.7", "cuda": "12.8", "slurm_job": "2"}
    assert differences(then, now) == ["torch was 2.8.0 and is 2.9.0"]


def test_the_hosts_of_all_ranks_are_told_if_there_are_several() -> None:
    assert environment({"node-7", "node-8", "login"})["hosts"] == "login,node-[7-8]"
    assert "hosts" not in environment({"node-7"})


def test_gpus_are_told_by_a_process_that_uses_them_and_asked_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def name() -> str:
        asked.append("the GPU's name")
        return "NVIDIA H100"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert "gpu" not in environment()
    assert not asked, "CUDA would begin, and nothing that forks later could use it"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    told = environment()
    assert (told["gpu"], told["gpus_per_host"]) == ("NVIDIA H100", "8")
