"""`overlap=True`: what is staged is the state as it was, whatever optimizer steps at once, and a write that no hook
sees is found. The GPUs are stand-ins."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import signal
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from holdfast.layout.plan import ChunkSizes, build_local_plan
from holdfast.staging import StagingArea
from holdfast.staging.copy import Copying
from holdfast.staging.overlap import TornSaveError
from holdfast.state import components
from holdfast.state.capture import capture
from tests.support.gpus import OnGpu, gpus
from tests.support.late_copies import late_copies
from tests.support.staged import pieces_of

SIZES = ChunkSizes(own_chunk_bytes=1024, cut_bytes=4096, pack_bytes=2048)


@pytest.fixture
def copies():
    with late_copies() as copies:
        yield copies


@pytest.fixture
def area():
    area = StagingArea(overlap=True)
    yield area
    area.close()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(24, 16))
        self.second = nn.Parameter(torch.randn(16, 24))
        self.still = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("count", torch.zeros(3))


def plan_of(pieces):
    return build_local_plan([piece.spec for piece in pieces], rank=0, world_size=1, sizes=SIZES)


def captured(state):
    return capture(state, rank=0, world_size=1).pieces


def stage(area, state):
    pieces = captured(state)
    return area.stage(plan_of(pieces), pieces)


def try_out(area, state):
    """The first save, and a step that changes nothing: later saves copy the state beside training."""
    stage(area, state).release()
    torch.optim.SGD([nn.Parameter(torch.zeros(1))]).step()


def content(shard):
    return b"".join(bytes(shard.chunk(ordinal)) for ordinal in range(shard.chunk_count))


def as_of_now(state):
    """What a save that training waits for would hold."""
    return content(stage(StagingArea(), state))


def classes():
    found = [each for each in vars(torch.optim).values() if inspect.isclass(each)]
    return [each for each in found if issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer]


def variants():
    for kind in classes():
        yield pytest.param(kind, {}, id=kind.__name__)
        for option in {"foreach", "fused"} & inspect.signature(kind).parameters.keys():
            yield pytest.param(kind, {option: True}, id=f"{kind.__name__}-{option}")


class Training:
    def __init__(self, kind, options, compiled=None):
        torch.manual_seed(3)
        self.model = Net()
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = kind(trained, lr=0.01, **options)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.is_sparse = kind is torch.optim.SparseAdam
        self._step = self.optimizer.step if compiled is None else torch.compile(self.optimizer.step, backend=compiled)

    def step(self):
        def closure():
            self.optimizer.zero_grad()
            loss = (self.model.first @ self.model.second).pow(2).mean()
            loss.backward()
            if self.is_sparse:
                for each in (self.model.first, self.model.second):
                    each.grad = each.grad.to_sparse()
            return loss

        if isinstance(self.optimizer, torch.optim.LBFGS):
            self._step(closure)
        else:
            closure()
            self._step()


@pytest.mark.rule("overlap-is-guarded")
@pytest.mark.parametrize(("kind", "options"), sorted(variants(), key=lambda each: each.id))
def test_whatever_optimizer_steps_at_once_the_save_has_the_state_of_before(kind, options, copies, area):
    training = Training(kind, options)
    training.step()
    try_out(area, training.state)
    for _ in range(2):
        training.step()
        before = as_of_now(training.state)
        shard = stage(area, training.state)
        training.step()
        assert content(shard) == before
        assert as_of_now(training.state) != before
        shard.release()
    assert copies.steps_that_waited == 2


@pytest.mark.rule("overlap-is-guarded")
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_compiled_step_waits_too_also_if_it_was_compiled_before_there_was_a_checkpointer(options, copies):
    training = Training(torch.optim.AdamW, options, compiled="aot_eager")
    training.step()
    area = StagingArea(overlap=True)
    try_out(area, training.state)
    for _ in range(2):
        before = as_of_now(training.state)
        shard = stage(area, training.state)
        training.step()
        assert content(shard) == before
        shard.release()
    assert copies.steps_that_waited == 2
    area.close()


@pytest.mark.rule("overlap-is-guarded")
def test_what_no_step_changes_is_copied_before_stage_returns(copies, area):
    training = Training(torch.optim.AdamW, {})
    lr = torch.tensor(0.5)
    training.optimizer.param_groups[0]["lr"] = lr
    training.step()
    training.state |= {"average": Net(), "notes": {"seen": torch.zeros(4)}}
    try_out(area, training.state)
    before = as_of_now(training.state)
    shard = stage(area, training.state)
    with torch.no_grad():
        training.model.count.add_(1)
        training.model.still.add_(1)
        lr.mul_(0.1)
        training.state["notes"]["seen"].add_(1)
        for each in training.state["average"].parameters():
            each.data.mul_(0.5)
    copies.let_go()
    assert content(shard) == before


def add(training):
    with torch.no_grad():
        training.model.first.add_(1)


def load(training):
    training.model.load_state_dict(Net().state_dict())


def average(training):
    with torch.no_grad():
        torch._foreach_lerp_([training.model.first], [training.model.second.t()], 0.5)


def moment(training):
    training.optimizer.state[training.model.first]["exp_avg"].zero_()


@pytest.mark.rule("overlap-is-guarded")
@pytest.mark.parametrize("write", [add, load, average, moment])
def test_a_write_that_is_no_step_tears_the_save_and_later_saves_copy_that_tensor_first(write, copies, area):
    training = Training(torch.optim.AdamW, {})
    training.step()
    try_out(area, training.state)
    shard = stage(area, training.state)
    write(training)
    copies.let_go()
    with pytest.raises(TornSaveError, match=r"'(model/first|optimizer/model/first/exp_avg)'.* was written to"):
        shard.chunk(0)
    shard.release()
    for _ in range(2):
        before = as_of_now(training.state)
        shard = stage(area, training.state)
        write(training)
        if len(copies.begun) > 1:
            training.step()
        assert content(shard) == before
        shard.release()


def test_a_write_before_the_step_that_waits_tears_the_save_as_well(copies, area):
    training = Training(torch.optim.SGD, {"fused": True})
    try_out(area, training.state)
    shard = stage(area, training.state)
    add(training)
    training.step()
    with pytest.raises(TornSaveError, match="'model/first' was written to"):
        content(shard)


@pytest.mark.rule("overlap-is-guarded")
def test_a_copy_is_not_over_before_a_tear_that_another_thread_has_found_is_known(copies, area):
    training = Training(torch.optim.SGD, {})
    try_out(area, training.state)
    shard = stage(area, training.state)
    add(training)
    found, go_on = threading.Event(), threading.Event()

    class Slow(set):
        def update(self, names):
            found.set()
            assert go_on.wait(60)
            super().update(names)

    shard.late._distrusted = Slow()
    checking = threading.Thread(target=shard.late.check)
    checking.start()
    assert found.wait(60)
    copies.let_go()
    assert not shard.late.wait(0.3)
    go_on.set()
    with pytest.raises(TornSaveError, match="'model/first' was written to"):
        shard.late.settle()
    checking.join()


@pytest.mark.rule("overlap-is-guarded")
@pytest.mark.parametrize("found_by", ["step", "confirm"])
def test_a_write_that_ends_after_the_copy_is_found_by_the_next_step_or_before_the_seal(found_by, copies, area):
    training = Training(torch.optim.SGD, {})
    try_out(area, training.state)
    shard = stage(area, training.state)
    copies.let_go()
    content(shard)
    add(training)  # torch raises a version only at the end of the write, which may have begun before
    if found_by == "step":
        training.step()
    with pytest.raises(TornSaveError, match="'model/first' was written to"):
        shard.late.settle() if found_by == "step" else shard.late.confirm()


@pytest.mark.rule("overlap-is-guarded")
def test_the_writes_of_steps_after_the_copy_tear_nothing(copies, area):
    training = Training(torch.optim.SGD, {})
    try_out(area, training.state)
    for waits in (True, False):
        shard = stage(area, training.state)
        copies.let_go()
        if waits:
            shard.late.settle()
        training.step()
        training.step()
        shard.late.confirm()
        shard.release()


@pytest.mark.rule("overlap-is-guarded")
def test_the_first_save_is_copied_first_and_what_is_written_to_after_it_is_copied_first_by_all(copies, area):
    training = Training(torch.optim.SGD, {})
    for begun in (0, 1, 2):
        before = as_of_now(training.state)
        shard = stage(area, training.state)
        assert len(copies.begun) == begun
        add(training)
        training.step()
        assert content(shard) == before
        shard.release()


@pytest.mark.parametrize("guarded", ["itself", "another tensor"])
def test_tensors_without_a_version_are_copied_before_stage_returns(guarded, copies, area):
    with torch.inference_mode():
        value = torch.ones(4)
    (piece,) = pieces_of({"value": value})
    area._overlap._trusted.add("value")
    piece = piece._replace(guarded=value if guarded == "itself" else nn.Parameter(torch.zeros(4)))
    shard = area.stage(plan_of([piece]), [piece])
    with torch.inference_mode():
        value.zero_()
    assert not copies.begun
    assert content(shard) == torch.ones(4).numpy().tobytes()


@pytest.mark.parametrize("option", ["capturable", "unhooked"])
def test_nothing_is_copied_beside_a_step_that_torch_calls_no_hook_for(option, copies, area, monkeypatch):
    training = Training(torch.optim.AdamW, {})
    training.step()
    try_out(area, training.state)
    if option == "capturable":
        training.optimizer.param_groups[0]["capturable"] = True
    else:
        monkeypatch.setattr(torch.optim.AdamW.step, "hooked", False)
    before = as_of_now(training.state)
    shard = stage(area, training.state)
    for each in training.model.parameters():
        each.data.zero_()
    assert not copies.begun
    assert content(shard) == before


class Wrapping(torch.optim.Optimizer):
    """As accelerate's: torch calls no hook for it, but for the optimizer inside it. `write` is called before that."""

    write = staticmethod(lambda: None)

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        self.write()
        return self.optimizer.step(closure)


def test_a_step_of_a_known_optimizer_that_wraps_another_waits(copies, area, monkeypatch):
    monkeypatch.setitem(components._ADDS_NOTHING, __name__, "optimizer")
    training = Training(torch.optim.AdamW, {})
    training.step()
    training.state["optimizer"] = Wrapping(training.optimizer)
    try_out(area, training.state)
    before = as_of_now(training.state)
    shard = stage(area, training.state)
    training.state["optimizer"].step()
    assert content(shard) == before
    assert copies.steps_that_waited == 1


@pytest.mark.rule("overlap-is-guarded")
def test_nothing_is_copied_beside_an_unknown_optimizer_that_may_write_before_it_steps_the_one_inside(copies, area):
    training = Training(torch.optim.AdamW, {})
    training.step()
    training.state["optimizer"] = optimizer = Wrapping(training.optimizer)
    optimizer.write = lambda: training.model.first.data.zero_()
    try_out(area, training.state)
    before = as_of_now(training.state)
    shard = stage(area, training.state)
    optimizer.step()
    assert not copies.begun
    assert content(shard) == before


class Itself(torch.optim.SGD):
    optimizer = property(lambda self: self)


def test_an_optimizer_that_gives_itself_as_the_one_inside_is_captured():
    model = Net()
    pieces = captured({"model": model, "optimizer": Itself([model.first], lr=0.1)})
    assert [piece.spec.name for piece in pieces if piece.guarded is not None] == ["model/first"]


def test_a_step_in_a_forked_process_waits_for_no_copy(copies, area):
    training = Training(torch.optim.SGD, {})
    try_out(area, training.state)
    shard = stage(area, training.state)
    if (child := os.fork()) == 0:
        signal.alarm(60)  # ends a step that waits for ever
        try:
            training.optimizer.step()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    copies.let_go()
    content(shard)


def test_the_wait_of_a_step_is_measured_and_a_step_after_the_copy_waits_for_nothing(copies, area):
    training = Training(torch.optim.SGD, {})
    try_out(area, training.state)
    shard = stage(area, training.state)
    training.step()
    shard.late.settle()
    assert shard.late.waited_seconds > 0
    shard.release()
    shard = stage(area, training.state)
    copies.let_go()
    shard.late.settle()
    training.step()
    assert copies.steps_that_waited == 1
    assert shard.late.waited_seconds == 0


def test_released_memory_is_not_written_to_by_a_late_copy(copies, area):
    training = Training(torch.optim.SGD, {})
    try_out(area, training.state)
    shard = stage(area, training.state)
    releasing = threading.Thread(target=shard.release)
    releasing.start()
    assert area.free == 0
    copies.let_go()
    releasing.join()
    assert area.free == 1


def test_an_area_that_fails_in_the_middle_of_staging_keeps_its_memory_until_the_copy_is_over(copies, area):
    training = Training(torch.optim.SGD, {})
    try_out(area, training.state)
    pieces = captured(training.state)
    free = []

    def fails():
        threading.Thread(target=lambda: (free.append(area.free), copies.let_go())).start()
        raise ValueError("looked in vain")

    with pytest.raises(ValueError, match="looked in vain"):
        area.stage(plan_of(pieces), pieces, meanwhile=fails)
    assert free == [0]
    assert copies.begun[0].wait(0)
    assert area.free == 1


@pytest.mark.parametrize("is_queued", [False, True])
def test_an_interrupt_while_a_copy_is_handed_over_holds_up_no_step_and_keeps_no_memory(
    is_queued, copies, area, monkeypatch
):
    training = Training(torch.optim.SGD, {})
    try_out(area, training.state)
    thread, submit, waited = area._overlap._thread, area._overlap._thread.submit, []
    wait = Copying.wait

    def interrupted(job):
        if is_queued:
            submit(job)
        raise KeyboardInterrupt

    monkeypatch.setattr(thread, "submit", interrupted)
    monkeypatch.setattr(Copying, "wait", lambda copying: (waited.append(area.free), wait(copying)))
    with pytest.raises(KeyboardInterrupt):
        stage(area, training.state)
    monkeypatch.undo()
    copies.let_go()
    assert waited == [0, 0], "both the copies that were begun and the slab's other ones are waited for"
    training.step()
    area.wait_for_copies()
    assert area.free == 1
    before = as_of_now(training.state)
    shard = stage(area, training.state)
    training.step()
    assert content(shard) == before


def test_a_copy_that_fails_fails_its_save_and_holds_no_step_up(copies, area, monkeypatch):
    def broken(*_):
        raise MemoryError("no room")

    training = Training(torch.optim.SGD, {})
    try_out(area, training.state)
    monkeypatch.setattr(area._copier, "copy_on_host", broken)
    pieces = [piece for piece in captured(training.state) if piece.guarded is not None]
    shard = area.stage(plan_of(pieces), pieces)
    training.step()
    with pytest.raises(MemoryError, match="no room"):
        shard.chunk(0)


def test_a_closed_area_leaves_no_hook_and_no_thread_behind():
    def left():
        return len(_global_optimizer_pre_hooks), sum(
            each.name.startswith("holdfast-copy") for each in threading.enumerate()
        )

    hooks, threads = left()
    area = StagingArea(overlap=True)
    assert left() == (hooks + 1, threads + 1)
    area.close()
    assert left() == (hooks, threads)


class OnGpus:
    """A parameter that says it is on the second GPU, and an optimizer that steps it."""

    def __init__(self):
        self.parameter = nn.Parameter(torch.randn(600))
        self.parameter.grad = torch.ones(600)
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)

    def stage(self, area):
        (piece,) = pieces_of({"weight": self.parameter})
        area._overlap._trusted.add("weight")  # as if there had been a save before
        return area.stage(plan_of([piece]), [piece._replace(local=OnGpu(piece.local), guarded=self.parameter)])


@pytest.mark.rule("overlap-is-guarded")
def test_on_a_gpu_the_stream_of_the_step_waits_and_not_its_thread(copies, area):
    with gpus() as here:
        training = OnGpus()
        before = training.parameter.detach().numpy().tobytes()
        shard = training.stage(area)
        training.optimizer.step()
        assert here.calls == ["lock"], "a thread of training waits for the copy"
        copies.let_go()
        assert content(shard) == before
        assert shard.late.waited_seconds == 2.0, "the stream's wait is told"
        assert (shard.late._events, shard.late._held) == ([], []), "no event is kept until the next save"
        shard.release()
        area.close()


def test_a_write_to_a_gpus_tensor_before_its_copy_is_over_is_found(copies, area):
    with gpus():
        training = OnGpus()
        shard = training.stage(area)
        with torch.no_grad():
            training.parameter.add_(1)
        copies.let_go()
        with pytest.raises(TornSaveError, match="'weight' was written to"):
            content(shard)
        shard.release()
        area.close()


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_copy_that_is_over_keeps_no_memory(copies, area, is_cancelled):
    training = Training(torch.optim.SGD, {})
    try_out(area, training.state)
    shard = stage(area, training.state)
    late, slab = shard.late, weakref.ref(shard._layout.slab)
    if is_cancelled:
        late.cancel(RuntimeError("given up"))
    copies.let_go()
    late.end()
    shard.release()
    area.close()
    del shard
    gc.collect()
    assert slab() is None


def test_a_step_that_is_captured_after_the_copy_tears_nothing(copies, area, monkeypatch):
    training = Training(torch.optim.SGD, {})
    try_out(area, training.state)
    before = as_of_now(training.state)
    shard = stage(area, training.state)
    copies.let_go()
    shard.late.settle()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    training.step()
    monkeypatch.undo()
    shard.late.confirm()
    assert content(shard) == before


def test_once_a_step_is_captured_into_a_graph_nothing_is_copied_beside_it(copies, area, monkeypatch, caplog):
    training = Training(torch.optim.SGD, {})
    try_out(area, training.state)
    shard = stage(area, training.state)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        training.step()
        training.step()
    monkeypatch.undo()
    copies.let_go()
    with pytest.raises(TornSaveError, match="captured into a CUDA graph"):
        content(shard)
    shard.release()
    content(stage(area, training.state))
    assert len(copies.begun) == 1
    assert caplog.text.count("overlap=True changes nothing any more") == 1
