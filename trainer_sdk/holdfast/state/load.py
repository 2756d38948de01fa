"""A stored state and the user's live one -> the reads, and then the load itself. The mirror of capture.py.

Flow: indexes -> StoredState -> **plan_load** -> plan_reads -> arrivals -> fetch, verify, scatter -> **LoadPlan.apply**
-> restore_rng. Planning makes all refusals but one, before anything has changed. Two values for one memory are refused
by apply, before it writes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import StateMismatchError, TreeFormatError
from holdfast.layout.reshard import WantedPiece
from holdfast.state.capture import TensorCollector, encode_component, open_module
from holdfast.state.components import (
    Component,
    Declarations,
    FitsAnyWorld,
    Kind,
    components_of,
    module_tensors,
    owner_of,
    parameters_by_id,
    path_of,
    set_extra_states,
)
from holdfast.state.destinations import Arrivals, Filler, Wants, fits
from holdfast.state.load_optimizer import LateSlots, Step, plan_optimizer
from holdfast.state.tensors import is_plain, refuse_unsupported, torch_dtype
from holdfast.state.tree import TensorRef, check_alike, check_known, decode_tree, rebuilt, refs_within, tensor_refs
from holdfast.state.wrappers import leaves, refuse_other_shards
from holdfast_protocol.index_documents import Layout


@dataclass(frozen=True)
class StoredState:
    """A checkpoint's documents, decoded from Layout and ShardIndex, as read before any tensor.

    With the same world size a rank needs its own index and rank 0's; with another one, every rank's, because per-rank
    state must then be merged or refused."""

    layout: Layout
    replicated_trees: Mapping[str, Any]
    """ShardIndex.replicated_trees of rank 0."""
    rank_trees: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Stored rank -> ShardIndex.trees."""

    @property
    def components(self) -> frozenset[str]:
        """Every component of the trees that were read."""
        return frozenset(self.replicated_trees).union(*self.rank_trees.values())


@dataclass(frozen=True)
class ChosenTree:
    """The encoded tree or trees that one component is loaded from."""

    encoded: tuple[Any, ...]
    merge: bool = False
    """There is one tree per stored rank, for the object's load_resharded_state_dict."""


def choose_tree(component: Component, stored: StoredState, *, world_size: int) -> ChosenTree | None:
    """This rank's tree, or None if the checkpoint lacks the component.

    On another world size no tree is this rank's own. Then, in this order: the component is now declared replicated
    (rank 0's is taken); the object can merge; all ranks saved the same, and it fits any world size; else
    StateMismatchError with the remedy.
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
    if component.replicated:
        return ChosenTree(encoded[:1])
    if component.kind is Kind.STATEFUL and hasattr(component.target, "load_resharded_state_dict"):
        return ChosenTree(encoded, merge=True)
    if _are_alike(encoded) and _fits_any_world(component, encoded[0], stored.layout, world_size):
        return ChosenTree(encoded[:1])
    raise StateMismatchError(
        key,
        f"each of {stored.layout.world_size} ranks saved its own and there are now {world_size}",
        "restore on as many ranks as saved it, or leave it out of the state"
        if component.kind in (Kind.MODULE, Kind.OPTIMIZER)
        else "declare it replicated if rank 0's will do for all, give the object "
        "load_resharded_state_dict(states, rank=…, world_size=…), or leave it out of the state",
    )


def _are_alike(encoded: tuple[Any, ...]) -> bool:
    return all(tree == encoded[0] for tree in encoded)


def _fits_any_world(component: Component, encoded: Any, layout: Layout, world_size: int) -> bool:
    """Whether a tree that all ranks saved alike is the whole of the component.

    A data loader's is not: it is a place in one rank's share. A module's does not name the parameters, and those of a
    rank that is no more would be left behind."""
    if component.kind is Kind.STATEFUL:
        return isinstance(component.target, FitsAnyWorld) or _is_sharded(encoded, layout)
    if component.kind is not Kind.MODULE:
        return True
    names = (name for name, entry in layout.tensors.items() if entry.component == component.key)
    return all((owner_of(name, component.key) or 0) < world_size for name in names)


def _is_sharded(encoded: Any, layout: Layout) -> bool:
    """Whether a tree that several ranks saved alike holds DTensors, such as averages of sharded weights. A rank's own
    tensors have its number in their names, and its tree is like no other."""
    return layout.world_size > 1 and bool(tensor_refs(encoded))


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
    # A tree names its tensors, so a value may be declared otherwise; names of modules and optimizers hold the
    # declaration.
    if component.kind in (Kind.MODULE, Kind.OPTIMIZER) and component.replicated is not saved_replicated:
        words = ("per rank", "replicated")
        raise StateMismatchError(
            component.key,
            f"it was saved {words[saved_replicated]} and is now declared {words[component.replicated]}",
            "declare it as it was saved",
        )


_DICTS = (dict, OrderedDict, Counter, defaultdict)


def graft(live: Any, restored: Any) -> Any:
    """`live`, made equal to `restored` in place, if both are the same kind of dict or list; else `restored`. In place,
    because other holders of the user's container must see the restored values too."""
    if type(live) is not type(restored):
        return restored
    if type(live) in _DICTS:
        values = {key: graft(live[key], value) if key in live else value for key, value in restored.items()}
        live.clear()
        live.update(values)
        if isinstance(live, defaultdict):
            live.default_factory = restored.default_factory
        return live
    if type(live) is list:
        shared = [graft(old, new) for old, new in zip(live, restored, strict=False)]
        live[:] = shared + restored[len(shared) :]
        return live
    return restored


@dataclass(frozen=True)
class LoadOptions:
    """How strictly the checkpoint must fit. The defaults are those of a resume."""

    strict: bool = True
    """State and checkpoint have the same components and tensors (of the given components)."""
    cast: bool = False
    """Values are converted to the live dtype; without it another dtype is refused."""
    exclude: tuple[str, ...] = ()
    """Patterns of tensor names (`model/head.*`): left as they are, with their optimizer slots."""

    def excludes(self, name: str) -> bool:
        """Whether a pattern matches `name` (shell style, case-sensitive)."""
        return any(fnmatchcase(name, pattern) for pattern in self.exclude)


@dataclass
class LoadReport:
    """Names that were not loaded; all empty on a strict load."""

    missing: list[str] = field(default_factory=list)
    """In the state, not in the checkpoint."""
    unexpected: list[str] = field(default_factory=list)
    """In the checkpoint's component, not in the state."""
    excluded: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LoadPlan:
    """Read every piece of `wanted` into its room of `arrivals`, verify all chunks, then apply."""

    wants: Wants = field(repr=False)
    report: LoadReport
    steps: tuple[Step, ...] = field(repr=False)
    late: tuple[LateSlots, ...] = field(default=(), repr=False)
    """Not part of `steps`."""

    @property
    def late_names(self) -> frozenset[str]:
        """The wanted tensors that only `late` takes."""
        return frozenset(self.wants.pieces).difference(self.wants.needed_first)

    @property
    def wanted(self) -> tuple[WantedPiece, ...]:
        return tuple(self.wants.pieces.values())

    def arrivals(self, *, into_live: bool) -> Arrivals:
        """Where the bytes arrive. With `into_live` live tensors change from the first byte on; else only apply changes
        them."""
        return self.wants.arrivals(into_live=into_live)

    def apply(self, arrivals: Arrivals) -> None:
        """Writes all that has not arrived in place; existing tensors stay if they fit. Once per arrivals, which it uses
        up. Raises StateMismatchError, before it writes, if two names have one memory here and two values there."""
        self.apply_first(arrivals)
        for slots in self.late:
            slots.put(arrivals)

    def apply_first(self, arrivals: Arrivals) -> None:
        """As apply(), without `late`: these parameters have no optimizer state then. The tensors of `late_names` need
        not have arrived."""
        for step in (*self.wants.checks, *self.steps):
            step(arrivals)
        for slots in self.late:
            slots.drop()


def plan_load(
    state: dict[str, Any],
    stored: StoredState,
    *,
    rank: int,
    world_size: int,
    declared: Declarations | None = None,
    options: LoadOptions | None = None,
    stream: bool = False,
) -> LoadPlan:
    """Plans loading `stored` into the objects of `state`; apply puts plain values back into `state` itself. `stream`:
    what can be `late` is.

    Components of the checkpoint that `state` does not ask for are ignored. Nothing is changed here.
    Raises StateMismatchError naming the key and the remedy, UnsupportedStateError, or TreeFormatError (bad index).
    """
    options = options or LoadOptions()
    components = components_of(state, rank=rank, declared=declared or Declarations())
    known = parameters_by_id(components)
    wants, report = Wants(stored.layout), LoadReport()
    steps: dict[str, list[Step]] = {component.key: [] for component in components}
    may_be_late: list[LateSlots] | None = [] if stream else None
    # Modules first: a value that views a parameter (`model.state_dict()`) gets memory of its own, not the parameter.
    for component in sorted(components, key=lambda each: _PLANNED.index(each.kind)):
        chosen = choose_tree(component, stored, world_size=world_size)
        if chosen is None:
            report.missing.append(component.key)
        elif component.kind is Kind.MODULE:
            steps[component.key] = _plan_module(component, chosen, wants, options, report)
        elif component.kind is Kind.OPTIMIZER:
            plan = partial(plan_optimizer, component, chosen.encoded[0], known, wants, late=may_be_late)
            steps[component.key] = plan(strict=options.strict, excludes=options.excludes)
        elif component.kind is Kind.STATEFUL:
            steps[component.key] = [_plan_stateful(component, chosen, wants, rank, world_size)]
        else:
            steps[component.key] = [_plan_value(state, component, chosen, wants)]
    if options.strict:
        _refuse_gaps(report)
    late, first = _part(may_be_late or [], wants)
    return LoadPlan(wants, report, (*chain.from_iterable(steps.values()), *(slots.put for slots in first)), tuple(late))


def _part(candidates: list[LateSlots], wants: Wants) -> tuple[list[LateSlots], list[LateSlots]]:
    """Those that can be late, and those with a tensor that something else takes first: a value of the state that is the
    very slot."""
    late, first = candidates, list[LateSlots]()
    while taken := [slots for slots in late if not wants.needed_first.isdisjoint(slots.names)]:
        first += taken
        late = [slots for slots in late if wants.needed_first.isdisjoint(slots.names)]
        wants.needed_first.update(*(slots.names for slots in taken))
    return late, first


_PLANNED = (Kind.MODULE, Kind.OPTIMIZER, Kind.STATEFUL, Kind.VALUE)


_GIVE_THE_SAME = "give the same state, or take the weights alone with holdfast.load_weights(…, strict=False)"


def _refuse_gaps(report: LoadReport) -> None:
    for names, where in (
        (report.missing, "the checkpoint does not have it"),
        (report.unexpected, "the state lacks it"),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise StateMismatchError(f"{names[0]}{more}", where, _GIVE_THE_SAME)


def _plan_module(
    component: Component, chosen: ChosenTree, wants: Wants, options: LoadOptions, report: LoadReport
) -> list[Step]:
    steps: list[Step] = []
    first_name: dict[int, str] = {}
    lacking: dict[int, str] = {}  # by tensor: none of its names so far is in the checkpoint
    extras, wrapped = open_module(component.key, chosen.encoded[0])
    covered = {ref.name for ref in tensor_refs(extras)}
    for fqn, tree in wrapped.items():
        if options.excludes(f"{component.key}/{fqn}"):  # what is excluded may be plain here
            covered.update(ref.name for ref in tensor_refs(tree))
    for path, tensor, excluded in list(_leaves_of_module(component, wrapped, options)):  # kept, because of their id()
        name = component.tensor_name(path, tensor)
        refuse_unsupported(name, tensor)
        covered.add(name)
        tied_to = first_name.setdefault(id(tensor), name)
        if excluded:
            report.excluded.append(name)
        elif tied_to != name and id(tensor) not in lacking:
            _check_tie(name, tied_to, wants)
        elif name not in wants.layout.tensors:
            lacking.setdefault(id(tensor), name)
        else:
            lacking.pop(id(tensor), None)
            first_name[id(tensor)] = name
            _check_dtype(name, tensor, wants, options)
            steps.append(_run(wants.into(name, tensor)))
    report.missing.extend(lacking.values())
    prefix = component.tensor_name(f"{component.key}/", torch.empty(0))
    report.unexpected.extend(
        name
        for name, entry in wants.layout.tensors.items()
        if entry.component == component.key
        and name.startswith(prefix)
        and name not in covered
        and not options.excludes(name)
    )
    if extras is not None:
        steps.append(_plan_tree(extras, {}, wants, partial(set_extra_states, component.target)))
    return steps


def _leaves_of_module(
    component: Component, wrapped: Mapping[str, Any], options: LoadOptions
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """The module's tensors by path, and whether each is excluded; of a tensor subclass those inside, and all of them
    are if one is. Raises StateMismatchError if it was saved as another kind of it, or was built otherwise: its tensors
    would mean something else."""
    for named in module_tensors(component.key, component.target):
        path = f"{component.key}/{named.fqn}"
        inside = [(path, named.tensor)] if is_plain(named.tensor) else list(leaves(path, named.tensor))
        excluded = options.excludes(path) or any(options.excludes(each) for each, _ in inside)
        if named.fqn in wrapped and not excluded:
            check_alike(path, named.tensor, decode_tree(wrapped[named.fqn]))
        for each, tensor in inside:
            yield each, tensor, excluded


def _check_tie(name: str, tied_to: str, wants: Wants) -> None:
    tensors = wants.layout.tensors
    stored_as = {tensors[at].alias_of or at for at in (name, tied_to) if at in tensors}
    if len(stored_as) > 1:
        raise StateMismatchError(
            name, f"the model ties it to {tied_to!r} and the checkpoint has two values", "untie them, or exclude one"
        )


def _check_dtype(name: str, live: torch.Tensor, wants: Wants, options: LoadOptions) -> None:
    saved = torch_dtype(wants.entry(name).dtype)
    if saved != live.dtype and not options.cast:
        raise StateMismatchError(
            name,
            f"it was saved as {saved} and is now {live.dtype}",
            "build the model alike, or take the weights alone with holdfast.load_weights(…), which converts them",
        )


def _plan_stateful(component: Component, chosen: ChosenTree, wants: Wants, rank: int, world_size: int) -> Step:
    if chosen.merge:
        states: list[Any] = []
        # Equal trees with tensors have those of all ranks: DTensors, which come back once for all the states, sharded
        # as they are here. All else each state has for itself, because a merge may add one to another.
        shared = _are_alike(chosen.encoded) and tensor_refs(chosen.encoded[0])
        live = _live_tensors(component) if shared else {}
        trees, times = (chosen.encoded[:1], len(chosen.encoded)) if shared else (chosen.encoded, 1)
        merging = [_plan_tree(tree, live, wants, states.append, in_place=False, times=times) for tree in trees]

        def merge(arrivals: Arrivals) -> None:
            for step in merging:
                step(arrivals)
            component.target.load_resharded_state_dict(states, rank=rank, world_size=world_size)

        return merge
    [encoded] = chosen.encoded
    # Some objects (stateful data loaders) begin an iteration when asked for their state: ask only if it is needed.
    live = _live_tensors(component) if tensor_refs(encoded) else {}
    return _plan_tree(encoded, live, wants, component.target.load_state_dict, in_place=False)


def _plan_value(state: dict[str, Any], component: Component, chosen: ChosenTree, wants: Wants) -> Step:
    def put(value: Any) -> None:
        state[component.key] = graft(state[component.key], value)

    return _plan_tree(chosen.encoded[0], _live_tensors(component), wants, put)


def _live_tensors(component: Component) -> dict[str, torch.Tensor]:
    """By name, and by path: the checkpoint may name them for another rank, or for none, as was declared then."""
    collector = TensorCollector(component)
    encode_component(component, {}, collector)
    return {path_of(name, component.key): tensor for name, tensor in collector.live.items()} | collector.live


def _plan_tree(
    encoded: Any,
    live: dict[str, torch.Tensor],
    wants: Wants,
    give: Callable[[Any], None],
    *,
    in_place: bool = True,
    times: int = 1,
) -> Step:
    """`times`: so often the value is given, each a tree of its own with the same tensors."""
    fillers: dict[str, Filler] = {}
    check_known(encoded)
    for ref, within in refs_within(encoded):
        entry = wants.entry(ref.name)
        beside = live.get(ref.name, live.get(path_of(ref.name, entry.component)))
        if within is not None and within.whole is not None:
            if not isinstance(beside, DTensor):
                raise StateMismatchError(
                    ref.name,
                    "it was saved as shards of a tensor subclass, and has none here",
                    "build it as it was saved",
                )
            if not fits(entry, beside):
                refuse_other_shards(ref.name)
        if beside is not None and not in_place and fits(entry, beside):
            fillers[ref.name] = wants.replaced(ref, beside)  # load_state_dict() may keep the tensors
        else:
            fillers[ref.name] = wants.referred(ref, beside)

    def load(arrivals: Arrivals) -> None:
        done: dict[str, torch.Tensor] = {}

        def resolve(ref: TensorRef) -> torch.Tensor:
            if ref.name not in done:
                done[ref.name] = fillers[ref.name](arrivals)
            return done[ref.name]

        for _ in range(times):
            give(decode_tree(encoded, resolve_tensor=resolve, rebuild=rebuilt))

    return load


def _run(filler: Filler) -> Step:
    def step(arrivals: Arrivals) -> None:
        filler(arrivals)

    return step
