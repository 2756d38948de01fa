"""Tensors that stay on their device: one copy of a step's values, read by the training thread alone."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from holdfast.session.curve import MetricCurve
from tests.support.device import Device, meta_device, on_device


@pytest.fixture
def device() -> Iterator[Device]:
    with meta_device() as device:
        yield device


def unsent(curve: MetricCurve) -> dict[str, list[Any]]:
    """As the heartbeat's thread asks for it."""
    with ThreadPoolExecutor(1) as heartbeat:
        return {name: list(points) for name, points in heartbeat.submit(curve.unsent).result().items()}


def test_a_step_makes_one_copy_and_later_steps_read_it(device: Device) -> None:
    curve = MetricCurve(takes=True)
    curve.take(0, {"loss": on_device(), "lr": 0.5, "norm": on_device()})
    assert device.done == ["event", "copy", "record"]
    curve.take(1, {"loss": on_device()})
    assert unsent(curve) == {"lr": [(0, 0.5)]}
    device.arrive(2)
    curve.take(2, None)
    assert unsent(curve) == {"lr": [(0, 0.5)], "loss": [(0, 0.0), (1, 100.0)], "norm": [(0, 1.0)]}


def test_each_type_of_number_has_a_copy_of_its_own(device: Device) -> None:
    """Stacked together, a count of tokens would lose digits."""
    curve = MetricCurve(takes=True)
    curve.take(0, {"loss": on_device(), "tokens": on_device(torch.int64), "norm": on_device()})
    assert [copy.numel() for copy in device.copies] == [2, 1]


def test_no_other_thread_asks_the_device(device: Device) -> None:
    curve = MetricCurve(takes=True)
    curve.take(0, {"loss": on_device()})
    device.arrive(1)
    assert unsent(curve) == {}
    with ThreadPoolExecutor(1) as deadline:
        deadline.submit(curve.take_arrived).result()
    assert unsent(curve) == {}
    curve.take_arrived()
    assert unsent(curve) == {"loss": [(0, 0.0)]}
    assert device.asked_by == {threading.get_ident()}


def test_while_a_graph_is_captured_no_event_is_asked_and_no_copy_begun(device: Device) -> None:
    curve = MetricCurve(takes=True)
    curve.take(0, {"loss": on_device()})
    device.arrive(1)
    device.captures = True
    curve.take(1, {"loss": on_device()})
    assert unsent(curve) == {}
    device.captures = False
    curve.take(2, {"loss": on_device()})
    assert unsent(curve) == {"loss": [(0, 0.0)]}
    assert len(device.copies) == 2


def test_a_device_that_fails_tells_nothing_more_and_ends_nothing(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    curve = MetricCurve(takes=True)
    curve.take(0, {"loss": on_device()})
    device.arrive(1)
    curve.take(1, {"loss": on_device()})
    device.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        for step in range(2, 5):
            curve.take(step, {"loss": on_device(), "lr": 0.5})
            curve.take_arrived()
    assert unsent(curve) == {"loss": [(0, 0.0)], "lr": [(2, 0.5), (3, 0.5), (4, 0.5)]}
    assert len(device.copies) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "what meta measures is no longer in the run's curves, because it has failed (RuntimeError)"
    ]


def test_the_copies_of_a_failed_device_outlive_the_interpreter() -> None:
    script = """
import os
import torch
from holdfast.session import curve

class Event:
    def query(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def __del__(self, write=os.write):
        write(1, b"freed")

curve._is_capturing = lambda device: False
curve._begin_copy = lambda values: (torch.zeros(1), Event())
taken = curve.MetricCurve(takes=True)
taken.take(0, {"loss": torch.empty((), device="meta")})
taken.take_arrived()
print("failed" if taken._failed else "", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "failed\n", ended.stderr


def test_a_device_without_events_copies_nothing(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    device.has_events = False
    curve = MetricCurve(takes=True)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        for step in range(3):
            curve.take(step, {"loss": on_device()})
    assert device.done == []
    assert len(caplog.records) == 1
    assert "the metric 'loss' is not in the run's curves: it cannot be copied from meta" in caplog.text


def test_a_device_far_behind_has_few_copies_to_make(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    curve = MetricCurve(takes=True)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        for step in range(1000):
            curve.take(step, {"loss": on_device(), "norm": on_device()})
    assert len(device.copies) == 256
    assert len(caplog.records) == 1
    device.arrive(256)
    for step in range(1000, 1100):
        curve.take(step, {"loss": on_device()})
    device.arrive(len(device.copies))
    curve.take_arrived()
    assert [step for step, _ in unsent(curve)["loss"]] == [*range(256), *range(1000, 1100)]
