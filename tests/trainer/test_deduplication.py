"""What is there already is not sent again: across steps, tied weights, optimizer slots, ranks, and runs of a project.

Bytes are counted on the wire (`stats.sent_bytes`). Each state has random bytes of its own, so no other test has sent
them before.
"""

from __future__ import annotations

import pytest
import torch
from gloo import run_ranks
from torch import nn

import holdfast

DOCUMENT_BYTES = 16 * 1024
"""More than index and layout of these small states take; they are chunks too, and change with the state."""


class Adapted(nn.Module):
    """A frozen base of 4 MiB and a LoRA adapter of 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(1024, 1024, bias=False).requires_grad_(False)
        self.down = nn.Linear(1024, 8, bias=False)
        self.up = nn.Linear(8, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def sent_by(ckpt: holdfast.Checkpointer, step: int, state: dict[str, object]) -> int:
    before = ckpt.stats.sent_bytes
    ckpt.save(step, state).committed.result(60)
    return ckpt.stats.sent_bytes - before


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 1024)).square().mean().backward()
    optimizer.step()


def bytes_of(tensors: object) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def test_a_frozen_base_is_sent_once_and_then_only_the_adapter(run):
    model = Adapted()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    state = {"model": model, "optimizer": optimizer}
    train_once(model, optimizer)
    with holdfast.Checkpointer(run) as ckpt:
        first = sent_by(ckpt, 0, state)
        train_once(model, optimizer)
        second = sent_by(ckpt, 1, state)
    assert first >= model.base.weight.nbytes
    assert second <= 3 * bytes_of(trained) + DOCUMENT_BYTES


def test_tied_weights_are_sent_once(run):
    embedding = nn.Embedding(1024, 1024)
    head = nn.Linear(1024, 1024, bias=False)
    head.weight = embedding.weight
    with holdfast.Checkpointer(run) as ckpt:
        sent = sent_by(ckpt, 0, {"model": nn.ModuleDict({"embedding": embedding, "head": head})})
    assert embedding.weight.nbytes <= sent <= embedding.weight.nbytes + DOCUMENT_BYTES


def test_slots_that_a_step_left_alone_are_not_sent_again(run):
    # Chunks of their own for each parameter's slots, as large tensors have them by default.
    sizes = holdfast.ChunkSizes(own_chunk_bytes=2**20, pack_bytes=2**20, cut_bytes=2**24)
    busy, idle = nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW([busy.weight, idle.weight])
    (busy.weight * torch.randn(1024, 1024) + idle.weight * torch.randn(1024, 1024)).sum().backward()
    optimizer.step()
    state = {"model": nn.ModuleList([busy, idle]), "optimizer": optimizer}
    with holdfast.Checkpointer(run, chunk_sizes=sizes) as ckpt:
        first = sent_by(ckpt, 0, state)
        optimizer.zero_grad()  # to None: the idle parameter gets no gradient, and the optimizer leaves its slots alone
        (busy.weight * torch.randn(1024, 1024)).sum().backward()
        optimizer.step()
        second = sent_by(ckpt, 1, state)
    assert first >= 6 * busy.weight.nbytes
    assert second <= 3 * busy.weight.nbytes + DOCUMENT_BYTES


def test_a_final_save_of_an_unchanged_state_sends_documents_only(run):
    model = nn.Linear(1024, 1024)
    with holdfast.Checkpointer(run) as ckpt:
        sent_by(ckpt, 0, {"model": model})
        again = sent_by(ckpt, 1, {"model": model})
    assert again <= DOCUMENT_BYTES


def test_another_run_of_the_project_sends_nothing_of_a_base_that_is_there(run, service, monkeypatch):
    # Over HTTP the store has hashed the bytes itself; else another attempt waits until the service has read them.
    monkeypatch.setenv("HOLDFAST_DIRECT_FILES", "false")
    model = Adapted()
    with holdfast.Checkpointer(run) as ckpt:
        sent_by(ckpt, 0, {"model": model})
    nn.init.normal_(model.up.weight)
    with holdfast.Checkpointer(f"{run}-2", create=True) as ckpt:
        sent = sent_by(ckpt, 0, {"model": model})
    assert sent <= bytes_of([model.up.weight, model.down.weight]) + DOCUMENT_BYTES


def save_replicated(rank: int, run: str) -> int:
    torch.manual_seed(0)  # the same on both ranks
    model = nn.ModuleList([nn.Linear(1024, 512, bias=False) for _ in range(4)])
    with holdfast.Checkpointer(run) as ckpt:
        return sent_by(ckpt, 0, {"model": model})


@pytest.mark.rule("layout-vote")
def test_ranks_with_the_same_weights_send_them_once_together(run):
    sent = run_ranks(save_replicated, 2, run)
    whole = 4 * 1024 * 512 * 4
    assert whole <= sum(sent) <= whole + 2 * DOCUMENT_BYTES
    assert all(0 < of_rank < whole for of_rank in sent), "both ranks have a share of them"
