"""One SHA-256 over every parameter, buffer and optimizer slot: equal digests mean equal bits."""

from __future__ import annotations

import hashlib

import torch


def fingerprint(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Full tensors only (plain modules and DDP). Only reads; the order of names and slots is fixed."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        _add(digest, name, tensor)
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        for slot, value in sorted(optimizer.state[parameter].items()):
            _add(digest, slot, torch.as_tensor(value))
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)
