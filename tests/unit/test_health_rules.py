"""What counts as diverged: tensors that are not finite, losses by their name, and a loss that leaves its band."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch

from holdfast.errors import ConfigurationError
from holdfast.health.diverged import FiniteCheck, HealthJudge, first_reasons, losses_are_finite
from holdfast.health.loss_spike import LossSpike
from holdfast.state.capture import capture
from holdfast.state.components import Declarations
from holdfast_protocol.checkpoints import MetricValue
from holdfast_service.training.commit import diverged_reason

NAN, INF = math.nan, math.inf


def found(state, check=None, **declared):
    """The names of what is not finite, of a world of one rank."""
    captured = capture(state, rank=0, world_size=1, declared=Declarations.of(**declared))
    names = [spec.name for spec in captured.specs if spec.alias_of is None]
    plan = SimpleNamespace(shard=SimpleNamespace(pieces=[SimpleNamespace(tensor=name) for name in names]))
    check = check or FiniteCheck()
    return check.found(check.look(plan, captured.pieces, state))


@pytest.mark.parametrize(
    ("value", "in_parameter", "in_frozen", "in_buffer", "in_optimizer", "in_extra"),
    [(NAN, True, True, True, True, False), (INF, True, False, False, True, False)],
)
def test_nan_counts_everywhere_and_infinity_in_what_is_trained(
    value, in_parameter, in_frozen, in_buffer, in_optimizer, in_extra
):
    model = torch.nn.BatchNorm1d(3)
    model.bias.requires_grad_(False)
    model.register_buffer("mask", torch.ones(2, 3, dtype=torch.bfloat16).t())
    optimizer = torch.optim.Adam([model.weight])
    model.weight.grad = torch.ones(3)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "best": {"loss": torch.tensor(1.0)}}
    assert found(state) == []
    slot = optimizer.state[model.weight]["exp_avg_sq"]
    for tensor, name, bad in (
        (model.weight, "model/weight", in_parameter),
        (model.bias, "model/bias", in_frozen),
        (model.mask, "model/mask", in_buffer),
        (model.running_var, "model/running_var", in_buffer),
        (slot, "optimizer/model/weight/exp_avg_sq", in_optimizer),
        (state["best"]["loss"], "best/loss", in_extra),
    ):
        before = tensor.detach().clone()
        with torch.no_grad():
            tensor[(0,) * tensor.ndim] = value
        assert found(state) == ([name] if bad else []), name
        with torch.no_grad():
            tensor.copy_(before)
    assert found(state) == []


def test_what_is_declared_frozen_is_looked_at_until_it_was_good_once():
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    check = FiniteCheck()
    frozen = ["model/*"]
    model.weight[0, 0] = NAN
    for _ in range(2):
        assert found({"model": model}, check, frozen=frozen) == ["model/weight"]
    model.weight[0, 0] = 0.0
    assert found({"model": model}, check, frozen=frozen) == []
    model.weight[0, 0] = NAN
    assert found({"model": model}, check, frozen=frozen) == [], "staging looks after what is declared"
    check.forget()
    assert found({"model": model}, check, frozen=frozen) == ["model/weight"]


def test_only_metrics_that_are_called_loss_must_be_finite():
    good = {"grad_norm": INF, "loss_scale": INF, "loss/scale": NAN, "perplexity": NAN, "loss": 2.0, "val_loss": 3.0}
    assert losses_are_finite(1, good) is True
    for name in ("loss", "val_loss", "train/lm_loss", "Loss", "losses_total", "crossEntropyLoss"):
        assert losses_are_finite(1, good | {name: NAN}) == f"the metric {name} is nan"


def test_a_rule_that_returns_nothing_is_told_and_not_believed(caplog):
    judge = HealthJudge(lambda step, metrics: None, asked=True)
    assert judge.judge(3, {"loss": MetricValue.of(1.0)}).healthy
    assert judge.judge(4, {"loss": MetricValue.of(INF)}).reason == "the metric loss is inf"
    assert "returned None" in caplog.text


def test_a_rule_that_observes_hears_of_no_step_without_metrics(caplog):
    class Rule:
        __call__ = staticmethod(losses_are_finite)

        def observe(self, step, metrics):
            seen.append(metrics["loss"])

    seen, judge = [], HealthJudge(Rule(), asked=True)
    for step, metrics in enumerate(({"loss": 1.0}, {}, None, {"loss": 2.0})):
        judge.observe(step, metrics)
    assert seen == [1.0, 2.0]
    assert not caplog.records


def losses(seed=0):
    drawn = random.Random(seed)
    return lambda step: 2.0 + 2.0 / (1 + step / 50) + drawn.gauss(0, 0.05)


@pytest.mark.parametrize("as_given", [float, torch.tensor], ids=["numbers", "tensors"])
def test_a_loss_that_leaves_its_band_and_comes_back(as_given):
    loss, rule = losses(), LossSpike(window=100)
    verdicts = {}
    for step in range(400):
        value = loss(step) + (3.0 if step in range(200, 230) or step == 300 else 0.0)
        rule.observe(step, {"loss": as_given(value), "lr": 0.1})
        if step % 10 == 9:
            verdicts[step] = rule(step, {"loss": value})
    assert [step for step, said in verdicts.items() if said is not True] == [209, 219, 229]
    assert verdicts[209].startswith("loss is ")


def test_a_new_level_that_stays_is_the_new_band():
    loss, rule = losses(), LossSpike(window=40)
    verdicts = []
    for step in range(300):
        rule.observe(step, {"loss": loss(step) + (5.0 if step >= 100 else 0.0)})
        verdicts.append(rule(step, {}))
    assert verdicts[99] is True
    assert verdicts[110] is not True
    assert verdicts[160:] == [True] * 140


def test_a_job_that_goes_back_has_not_seen_what_came_after():
    loss, rule = losses(), LossSpike(window=40)
    for step in range(100):
        rule.observe(step, {"loss": loss(step) if step < 95 else 50.0})
    assert rule(99, {}) is not True
    for step in range(90, 96):
        rule.observe(step, {"loss": loss(step)})
    assert rule(95, {}) is True


def test_a_loss_that_is_not_finite_is_no_ordinary_one():
    rule = LossSpike("perplexity", window=40)
    assert rule(1, {"perplexity": NAN}) == "perplexity is nan"
    for step in range(20):
        rule.observe(step, {"perplexity": 2.0 if step < 17 else NAN})
    assert rule(20, {"perplexity": 2.0}) is not True


def test_a_spike_that_nobody_could_see_is_refused():
    for wrong in ({"deviations": 0}, {"recent": 0}, {"window": 10}):
        with pytest.raises(ConfigurationError):
            LossSpike(**wrong)


def test_without_being_demanded_only_gpus_are_looked_at_and_nothing_fails_for_it(caplog):
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    model.weight[0, 0] = NAN
    assert found({"model": model}) == ["model/weight"]
    assert found({"model": model}, FiniteCheck(demanded=False)) == []
    check = FiniteCheck(demanded=False)
    for _ in range(2):
        assert check.found(check.look(None, (), {"model": model})) == []
    assert caplog.text.count("could not be checked") == 1


def test_of_many_ranks_a_few_say_what_is_wrong():
    told = [f"model/{rank % 7} held NaN or infinity" for rank in range(1000)]
    verdicts = {rank: {"healthy": False, "reason": reason} for rank, reason in enumerate(told)}
    said, kept = first_reasons(told), diverged_reason([], {}, verdicts)
    assert said.startswith("model/0 held NaN or infinity; model/1")
    for text in (said, kept):
        assert "model/4 held" in text
        assert text.endswith("; and 285 more ranks")
        assert len(text) < 500
    assert first_reasons(told[:6]).endswith("; and 1 more rank")
    assert first_reasons(told[:2]) == "; ".join(told[:2])
