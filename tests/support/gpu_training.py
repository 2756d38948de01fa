"""A training job on a device, with what a GPU has of its own: autocast, GradScaler, dropout from the device's
generator. On the CPU it does the same, so that its mistakes are found where there is no GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

WIDTH = 16


class Net(nn.Module):
    """Two layers that are tied, dropout between them, and a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.drop = nn.Dropout(0.25)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.second(self.drop(torch.tanh(self.first(batch))))


class GpuJob:
    """`wrap`: DDP or FSDP2, of the model on its device. `options`: of AdamW."""

    def __init__(self, device: torch.device, seed: int = 0, wrap: Any = None, **options: bool) -> None:
        self.device = device
        torch.manual_seed(seed)  # of all devices
        model: nn.Module = Net().to(device)
        if wrap is not None:
            model = wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
        # Begins so high that the first steps overflow: it skips them, and its scale is a part of the state.
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**20, growth_interval=3)
        self.state: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "scaler": scaler,
            "average": {"of": torch.zeros(WIDTH, device=device), "half": torch.zeros(3, device=device).half()},
        }

    def step(self) -> float:
        model, optimizer, scaler = self.state["model"], self.state["optimizer"], self.state["scaler"]
        batch = torch.randn(8, WIDTH, device=self.device)
        kind = torch.float16 if self.device.type == "cuda" else torch.bfloat16
        with torch.autocast(self.device.type, dtype=kind):
            loss = (model(batch) - batch).pow(2).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            self.state["average"]["of"].lerp_(batch.mean(dim=0), 0.1)
            self.state["average"]["half"] += 0.5
        return float(loss.detach())

    def values(self) -> dict[str, Any]:
        """All that it holds, comparable with ==: tensors as device, dtype, shape, bytes."""
        found: dict[str, Any] = {f"model.{name}": bits(each) for name, each in self.state["model"].state_dict().items()}
        for parameter, slots in self.state["optimizer"].state.items():
            place = next(at for at, each in enumerate(self.state["model"].parameters()) if each is parameter)
            found |= {f"slot.{place}.{name}": bits(value) for name, value in slots.items()}
        found |= {f"average.{name}": bits(value) for name, value in self.state["average"].items()}
        return found | {"scaler": self.state["scaler"].state_dict()}


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> tuple[str, str, tuple[int, ...], bytes]:
    """Of a tensor of any form; of a DTensor this rank's part."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    plain = local.detach().resolve_conj().resolve_neg()
    if not plain.is_complex():  # some dtypes have few kernels
        plain = plain.view(_BITS[plain.itemsize])
    plain = plain.contiguous().cpu()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return local.device.type, str(local.dtype), tuple(plain.shape), content


def drawn(device: torch.device) -> tuple[Any, ...]:
    """The next numbers of this device's generator and of the host's."""
    return torch.rand(4, device=device).tolist(), torch.rand(4).tolist()


class Memory:
    """What was allocated on a device since it was made; nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._now()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def _now(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    @property
    def kept_bytes(self) -> int:
        return self._now() - self._before

    @property
    def peak_bytes(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0
        return peak - self._before if self._device.type == "cuda" else 0


def stream(device: torch.device) -> AbstractContextManager[Any]:
    """Another stream than the current one. It waits for nothing."""
    if device.type == "cuda":
        return torch.cuda.stream(torch.cuda.Stream(device))
    return nullcontext()


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def keep_busy(device: torch.device) -> None:
    """Queues work of some tenths of a second on the current stream, and does not wait for it."""
    if device.type == "cuda":
        square = torch.full((4096, 4096), 1e-4, device=device)
        for _ in range(50):
            square = square @ square


class Captured:
    """`work`, captured as a CUDA graph; on the CPU called as it is. `work` reads and writes static tensors only."""

    def __init__(self, device: torch.device, work: Any) -> None:
        self._graph = None
        if device.type != "cuda":
            self._work = work
            return
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):  # the first call makes workspaces, which a capture must not
            work()
        torch.cuda.current_stream(device).wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            work()

    def replay(self) -> None:
        if self._graph is None:
            self._work()
        else:
            self._graph.replay()
