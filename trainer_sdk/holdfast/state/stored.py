"""What a restore has read before any tensor: the layout and the trees; and which tree is this rank's.

Flow: restore reads the indexes -> StoredState -> load.py plans. With the same world size a rank needs its own index and
rank 0's; with another one, every rank's, because per-rank state must then be merged or refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.state.components import Component, Kind
from holdfast.state.errors import StateMismatchError, TreeFormatError
from holdfast_protocol.index_documents import Layout


@dataclass(frozen=True)
class StoredState:
    """A checkpoint's documents, decoded from Layout and ShardIndex."""

    layout: Layout
    replicated_trees: Mapping[str, Any]
    """ShardIndex.replicated_trees of rank 0."""
    rank_trees: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Stored rank -> ShardIndex.trees."""

    @property
    def components(self) -> frozenset[str]:
        """Every component that the trees which were read know."""
        return frozenset(self.replicated_trees).union(*self.rank_trees.values())


@dataclass(frozen=True)
class ChosenTree:
    """The encoded tree or trees that one component is loaded from."""

    encoded: tuple[Any, ...]
    merge: bool = False
    """There is one tree per stored rank, for the object's load_resharded_state_dict."""


def choose_tree(component: Component, stored: StoredState, *, world_size: int) -> ChosenTree | None:
    """This rank's tree, or None when the checkpoint has no such component.

    Another world size has no rank's own tree. Then, in this order: all ranks saved the same; the component is now
    declared replicated (rank 0's is taken); the object can merge; else StateMismatchError with the remedy.
    """
    key = component.key
    if key in stored.replicated_trees:
        _check_declared_alike(component, saved_replicated=True)
        return ChosenTree((_open(component, stored.replicated_trees[key]),))
    if key not in stored.components:
        return None
    _check_declared_alike(component, saved_replicated=False)
    if stored.layout.world_size == world_size:
        trees = stored.rank_trees.get(component.rank, {})
        return ChosenTree((_open(component, trees[key]),)) if key in trees else None
    absent = [rank for rank in range(stored.layout.world_size) if key not in stored.rank_trees.get(rank, {})]
    if absent:
        raise StateMismatchError(
            key, f"it was saved per rank, and rank {absent[0]} has none", "restore on as many ranks as saved it"
        )
    encoded = tuple(_open(component, stored.rank_trees[rank][key]) for rank in range(stored.layout.world_size))
    if component.replicated or all(tree == encoded[0] for tree in encoded):
        return ChosenTree(encoded[:1])
    if hasattr(component.target, "load_resharded_state_dict"):
        return ChosenTree(encoded, merge=True)
    raise StateMismatchError(
        key,
        f"each of {stored.layout.world_size} ranks saved its own and there are now {world_size}",
        "declare it replicated if rank 0's will do for all, give the object "
        "load_resharded_state_dict(states, rank=…, world_size=…), or leave it out of the state",
    )


def _open(component: Component, tree: Any) -> Any:
    if type(tree) is not list or len(tree) != 2:
        raise TreeFormatError(f"the index entry of component {component.key!r} is malformed")
    kind, encoded = tree
    if kind != component.kind.value:
        raise StateMismatchError(
            component.key, f"a {str(kind)[:20]} was saved and a {component.kind.value} is given", "give the same object"
        )
    return encoded


def _check_declared_alike(component: Component, *, saved_replicated: bool) -> None:
    # A tree names its tensors, so a value may be declared anew; a module's and optimizer's names hold the declaration.
    if component.kind in (Kind.MODULE, Kind.OPTIMIZER) and component.replicated is not saved_replicated:
        words = ("per rank", "replicated")
        raise StateMismatchError(
            component.key,
            f"it was saved {words[saved_replicated]} and is now declared {words[component.replicated]}",
            "declare it as it was saved",
        )
