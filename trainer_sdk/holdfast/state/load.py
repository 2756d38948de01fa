"""A stored state and the user's live one -> what to read, and then the load itself. The mirror of capture.py.

Flow: indexes -> **plan_load** -> plan_reads -> arrivals -> fetch, verify, scatter -> **LoadPlan.apply** -> restore_rng.
Everything that can be refused is refused while planning, when nothing has changed; apply only writes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from holdfast.layout.reshard import WantedPiece
from holdfast.state.arrivals import Arrivals
from holdfast.state.capture import TensorCollector, encode_component, parameters_by_id
from holdfast.state.components import Component, Declarations, Kind, components_of
from holdfast.state.destinations import Filler, Wants, fits
from holdfast.state.errors import StateMismatchError
from holdfast.state.graft import graft
from holdfast.state.load_optimizer import plan_optimizer
from holdfast.state.modules import module_tensors, set_extra_states
from holdfast.state.stored import ChosenTree, StoredState, choose_tree
from holdfast.state.tensors import refuse_unsupported, torch_dtype
from holdfast.state.tree import TensorRef, decode_tree, tensor_refs

Step = Callable[[Arrivals], None]


@dataclass(frozen=True)
class LoadOptions:
    """How strictly the checkpoint must fit. The defaults are those of a resume."""

    strict: bool = True
    """Every component and tensor of the state is in the checkpoint and the other way round (for given components)."""
    cast: bool = False
    """Values are converted to the live dtype; without it another dtype is refused."""
    exclude: tuple[str, ...] = ()
    """Patterns of tensor names (`model/head.*`): left as they are, with their optimizer slots."""

    def excludes(self, name: str) -> bool:
        """Whether a pattern matches `name` (shell style, case-sensitive)."""
        return any(fnmatchcase(name, pattern) for pattern in self.exclude)


@dataclass
class LoadReport:
    """What was not loaded, by name; all empty on a strict load."""

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

    @property
    def wanted(self) -> tuple[WantedPiece, ...]:
        return tuple(self.wants.pieces.values())

    def arrivals(self, *, into_live: bool) -> Arrivals:
        """Where the bytes arrive. With `into_live` live tensors change from the first byte on; else by apply only."""
        return self.wants.arrivals(into_live=into_live)

    def apply(self, arrivals: Arrivals) -> None:
        """Write all that is not there yet, in place wherever tensors fit. Once per arrivals, which it uses up."""
        for step in self.steps:
            step(arrivals)


def plan_load(
    state: dict[str, Any],
    stored: StoredState,
    *,
    rank: int,
    world_size: int,
    declared: Declarations | None = None,
    options: LoadOptions | None = None,
) -> LoadPlan:
    """Plan loading `stored` into the objects of `state`; plain values are put back into `state` itself by apply.

    Components of the checkpoint that `state` does not ask for are left alone. Nothing is changed here.
    Raises StateMismatchError naming the key and the remedy, UnsupportedStateError, or TreeFormatError (bad index).
    """
    options = options or LoadOptions()
    components = components_of(state, rank=rank, declared=declared or Declarations())
    known = parameters_by_id(components)
    wants, report = Wants(stored.layout), LoadReport()
    steps: list[Step] = []
    for component in components:
        chosen = choose_tree(component, stored, world_size=world_size)
        if chosen is None:
            report.missing.append(component.key)
        elif component.kind is Kind.MODULE:
            steps.extend(_plan_module(component, chosen, wants, options, report))
        elif component.kind is Kind.OPTIMIZER:
            plan = partial(plan_optimizer, component, chosen.encoded[0], known, wants)
            steps.extend(plan(strict=options.strict, excludes=options.excludes))
        elif component.kind is Kind.STATEFUL:
            steps.append(_plan_stateful(component, chosen, wants, rank, world_size))
        else:
            steps.append(_plan_value(state, component, chosen, wants))
    if options.strict:
        _refuse_gaps(report)
    return LoadPlan(wants, report, tuple(steps))


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
    covered = {ref.name for ref in tensor_refs(chosen.encoded[0])}
    for named in module_tensors(component.key, component.target):
        name = component.tensor_name(f"{component.key}/{named.fqn}", named.tensor)
        refuse_unsupported(name, named.tensor)
        covered.add(name)
        tied_to = first_name.setdefault(id(named.tensor), name)
        if options.excludes(f"{component.key}/{named.fqn}"):
            report.excluded.append(name)
        elif tied_to != name:
            _check_tie(name, tied_to, wants)
        elif name not in wants.layout.tensors:
            report.missing.append(name)
        else:
            _check_dtype(name, named.tensor, wants, options)
            steps.append(_run(wants.into(name, named.tensor)))
    prefix = component.tensor_name(f"{component.key}/", torch.empty(0))
    report.unexpected.extend(
        name
        for name, entry in wants.layout.tensors.items()
        if entry.component == component.key
        and name.startswith(prefix)
        and name not in covered
        and not options.excludes(name)
    )
    if chosen.encoded[0] is not None:
        steps.append(_plan_tree(chosen.encoded[0], {}, wants, partial(set_extra_states, component.target)))
    return steps


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
        merging = [_plan_tree(tree, {}, wants, states.append) for tree in chosen.encoded]

        def merge(arrivals: Arrivals) -> None:
            for step in merging:
                step(arrivals)
            component.target.load_resharded_state_dict(states, rank=rank, world_size=world_size)

        return merge
    [encoded] = chosen.encoded
    # Some objects (stateful data loaders) begin an iteration when asked for their state: ask only where it is needed.
    live = _live_tensors(component) if tensor_refs(encoded) else {}
    return _plan_tree(encoded, live, wants, component.target.load_state_dict, in_place=False)


def _plan_value(state: dict[str, Any], component: Component, chosen: ChosenTree, wants: Wants) -> Step:
    def put(value: Any) -> None:
        state[component.key] = graft(state[component.key], value)

    return _plan_tree(chosen.encoded[0], _live_tensors(component), wants, put)


def _live_tensors(component: Component) -> dict[str, torch.Tensor]:
    collector = TensorCollector(component)
    encode_component(component, {}, collector)
    return collector.live


def _plan_tree(
    encoded: Any,
    live: dict[str, torch.Tensor],
    wants: Wants,
    give: Callable[[Any], None],
    *,
    in_place: bool = True,
) -> Step:
    fillers: dict[str, Filler] = {}
    for ref in tensor_refs(encoded):
        beside = live.get(ref.name)
        if beside is not None and not in_place and fits(wants.entry(ref.name), beside):
            fillers[ref.name] = wants.like(ref.name, beside)  # load_state_dict() must be given tensors of its own
        else:
            fillers[ref.name] = wants.referred(ref, beside)

    def load(arrivals: Arrivals) -> None:
        done: dict[str, torch.Tensor] = {}

        def resolve(ref: TensorRef) -> torch.Tensor:
            if ref.name not in done:
                done[ref.name] = fillers[ref.name](arrivals)
            return done[ref.name]

        give(decode_tree(encoded, resolve_tensor=resolve))

    return load


def _run(filler: Filler) -> Step:
    def step(arrivals: Arrivals) -> None:
        filler(arrivals)

    return step
