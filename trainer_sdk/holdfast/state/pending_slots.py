"""What stands in the place of an optimizer's `state` until a streamed restore has brought it: whoever uses it waits.

An optimizer's state is read by more than its step: state_dict(), copy.deepcopy, a library's train() and eval(), a
script. None of them may find a state that is not there yet, so that it would take it for a new optimizer's.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from holdfast.state.before_step import do_nothing
from holdfast.state.load_optimizer import LateSlots


class PendingState(defaultdict[torch.Tensor, Any]):
    """Each use waits, and then uses the optimizer's own dict, also if it is kept beyond that."""

    def __init__(
        self, own: defaultdict[torch.Tensor, Any], wait: Callable[[], object], abandon: Callable[[], Any]
    ) -> None:
        """`abandon` ends the restore that this waits for, because the state is loaded anew, and returns it."""
        super().__init__()
        self._own = own
        self._wait = wait
        self.abandon = abandon

    def arrived(self) -> defaultdict[torch.Tensor, Any]:
        """The optimizer's own dict. Raises the error of the restore."""
        self._wait()
        return self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.arrived(), memo)


def _waiting(name: str) -> Callable[..., Any]:
    def use(self: PendingState, *given: Any, **options: Any) -> Any:
        return getattr(self.arrived(), name)(*given, **options)

    use.__name__ = name
    return use


_USES = (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__reversed__", "__len__"),
    *("__eq__", "__ne__", "__or__", "__ror__", "__ior__", "__repr__", "__reduce__", "__reduce_ex__", "__copy__"),
    *("clear", "copy", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"),
)
for _name in _USES:
    setattr(PendingState, _name, _waiting(_name))


class PendingOptimizer:
    """One optimizer whose state is still to come, from __init__ to put() or give_up()."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, wait: Callable[[], object], abandon: Callable[[], Any]
    ) -> None:
        self.optimizer = optimizer
        self._own = optimizer.state
        self._pending = PendingState(self._own, wait, abandon)
        optimizer.state = self._pending

        def before_load(_optimizer: torch.optim.Optimizer, _state: dict[str, Any]) -> None:
            wait()

        # load_state_dict() sets another dict without a look at this one: what it loads must come last.
        self._hook = optimizer.register_load_state_dict_pre_hook(before_load)

    def put(self, made: Mapping[LateSlots, dict[Any, Any] | None]) -> None:
        """The state is there."""
        for slots, values in made.items():
            if slots.optimizer is self.optimizer and values is not None:
                self._own[slots.parameter] = values
        self.give_up()

    def give_up(self) -> None:
        """Whoever uses the state waits no more. A dict that the script has set meanwhile stays."""
        do_nothing(self._hook)  # load_state_dict() may have called it
        if self.optimizer.state is self._pending:
            self.optimizer.state = self._own
