"""The state that everybody saves: a transformer's parameters in fp32 with AdamW's two moments, random, no two alike.

Torch only: the peers build it in their own environment, from the same seed to the same bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

_MIB = 1024 * 1024
_FROZEN_SHARE = 0.95


@dataclass(frozen=True)
class TrainingState:
    model: torch.nn.Module
    optimizer: torch.optim.AdamW

    def objects(self) -> dict[str, torch.nn.Module | torch.optim.Optimizer]:
        """As a training script hands it to Holdfast."""
        return {"model": self.model, "optimizer": self.optimizer}

    def changing(self) -> list[torch.Tensor]:
        """What a training step changes: trainable parameters and the optimizer's slots."""
        slots = [value for slot in self.optimizer.state.values() for value in slot.values()]
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad] + slots

    def tensors(self) -> list[torch.Tensor]:
        frozen = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        return frozen + self.changing()

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    @torch.no_grad()
    def change(self) -> int:
        """One step of training, as far as a checkpoint sees it: every changing element. It is over when this returns
        the bytes changed."""
        changing = self.changing()
        torch._foreach_add_(changing, 1.0)
        self.wait()
        return sum(tensor.nbytes for tensor in changing)

    def wait(self) -> None:
        """Until all that is queued on the state's device is over."""
        if any(tensor.is_cuda for tensor in self.model.parameters()):
            torch.cuda.synchronize()

    @torch.no_grad()
    def fingerprint(self) -> str:
        """Differs where a bit does, in all likelihood; costs little, as it is taken outside of what is measured."""
        sums = [int(tensor.detach().view(torch.int32).sum(dtype=torch.int64)) for tensor in self.tensors()]
        return hashlib.sha256(repr(sums).encode()).hexdigest()


def build(size_bytes: int, *, seed: int = 0, frozen: bool = False, device: str = "cpu") -> TrainingState:
    """About `size_bytes` of state. `frozen`: 95% of its bytes are a frozen base, the rest is trained."""
    torch.manual_seed(seed)
    width = 1024 if size_bytes >= 256 * _MIB else 256 if size_bytes >= 16 * _MIB else 64
    if frozen:
        base = _layers(int(size_bytes * _FROZEN_SHARE) // 4, width).requires_grad_(False)
        model = torch.nn.ModuleDict({"base": base, "head": _layers(int(size_bytes * (1 - _FROZEN_SHARE)) // 12, width)})
    else:
        model = torch.nn.ModuleDict({"body": _layers(size_bytes // 12, width)})
    model.to(device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    for parameter in trained:  # as after a first step, without the memory of its gradients
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.randn_like(parameter),
            "exp_avg_sq": torch.rand_like(parameter),
        }
    return TrainingState(model, optimizer)


def _layers(parameters: int, width: int) -> torch.nn.Module:
    """Transformer blocks of `width`, and an embedding for what does not make a whole one."""
    of_block = 12 * width * width + 13 * width
    blocks = max(0, parameters // of_block)
    rest = max(1, (parameters - blocks * of_block) // width)
    return torch.nn.ModuleDict(
        {
            "blocks": torch.nn.ModuleList(
                torch.nn.ModuleDict(
                    {
                        "attention": torch.nn.Linear(width, 3 * width),
                        "projection": torch.nn.Linear(width, width),
                        "up": torch.nn.Linear(width, 4 * width),
                        "down": torch.nn.Linear(4 * width, width),
                        "norm_1": torch.nn.LayerNorm(width),
                        "norm_2": torch.nn.LayerNorm(width),
                    }
                )
                for _ in range(blocks)
            ),
            "embedding": torch.nn.Embedding(rest, width),
        }
    )
