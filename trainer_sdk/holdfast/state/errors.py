"""What can be wrong with a training state, by what the user does about it. Below every other file of state/."""

from typing import Any

from holdfast_client.errors import IntegrityError, rebuild_error


class StateError(ValueError):
    """Something is wrong with the state that was given or with how it fits the checkpoint."""

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_error, (type(self), self.args, vars(self))


class UnsupportedStateError(StateError):
    """The state holds something that cannot be saved exactly. Names the key, says what to give instead."""

    def __init__(self, path: str, what: str, remedy: str) -> None:
        super().__init__(f"{path or 'the state'} cannot be saved: {what}; {remedy}")
        self.path = path


class StateMismatchError(StateError):
    """The checkpoint does not fit the state it is loaded into. Names the key, says what to change."""

    def __init__(self, path: str, what: str, remedy: str) -> None:
        super().__init__(f"{path} cannot be loaded: {what}; {remedy}")
        self.path = path


class TreeFormatError(IntegrityError):
    """An encoded typed tree is malformed: a damaged or hostile index, or one from a newer version. The checkpoint is at
    fault and not the state that is given, so a restore goes on to the point before."""

    code = "tree_format"
