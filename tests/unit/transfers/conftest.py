"""The service that chunks go to and come from, and what every transfer must leave behind: nothing."""

from __future__ import annotations

import threading

import pytest

from holdfast_client.chunks import uploader as uploader_module
from tests.support.transfers import Service


@pytest.fixture
def service():
    started = Service()
    yield started
    started.close()


@pytest.fixture
def mounted(tmp_path):
    started = Service(mount=tmp_path)
    yield started
    started.close()


@pytest.fixture(autouse=True)
def _threads_do_not_leak():
    # Jobs that other tests let die without a close still have theirs.
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("holdfast-")]
    assert left == []


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch):
    monkeypatch.setattr(uploader_module, "MISSING_PAUSE_SECONDS", 0.01)


@pytest.fixture
def patient(monkeypatch):
    """A call carries all that it can, however crowded the machine is."""
    monkeypatch.setattr(uploader_module, "QUIET_SECONDS", 60.0)
    monkeypatch.setattr(uploader_module, "REPORT_SECONDS", 60.0)
