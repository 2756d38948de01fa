"""torch's hook before the steps of all optimizers, for what must be over before one may write: the copies of a save
(staging/overlap.py), and what a streamed restore still has to bring (restore/streamed_rest.py).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class BeforeStep:
    """Calls `act(optimizer)` before each step of any torch optimizer, on the thread of the step, until remove()."""

    def __init__(self, act: Callable[[torch.optim.Optimizer], None]) -> None:
        self._act = act
        self._lock = threading.Lock()
        self._steps = 0
        """So many threads are in `act`."""
        self._process_id = os.getpid()
        # Not for the compiler: it would trace into locks. A compiled step calls the hook between two graphs.
        hook = torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
        self._hook = register_optimizer_step_pre_hook(hook)

    def remove(self) -> None:
        """From any thread, also within `act`, and more than once. torch goes through its hooks while a step is in
        `act`, and none may leave them then: the hook does nothing any more, and a later call removes it."""
        with self._lock:
            if self._steps:
                do_nothing(self._hook)
            else:
                self._hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if os.getpid() != self._process_id:  # a fork has its own memory, and none of our threads
            return
        with self._lock:
            self._steps += 1
        try:
            self._act(optimizer)
        finally:
            with self._lock:
                self._steps -= 1


def do_nothing(hook: RemovableHandle) -> None:
    """Where a hook must not be removed, because torch may be going through its hooks at this moment."""
    hooks = hook.hooks_dict_ref()
    if hooks is not None and hook.id in hooks:
        hooks[hook.id] = _nothing


def _nothing(*_: Any) -> None:
    pass


def is_being_captured() -> bool:
    """Whether the step becomes part of a CUDA graph, which is replayed without a call of the hook."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
