"""A staged save outlives an outage that no call of the training thread would wait for."""

from __future__ import annotations

import threading

import pytest

import holdfast
from holdfast import errors
from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings
from tests.chaos.conftest import RestartableService


@pytest.mark.parametrize("uploading", [False, True])
def test_a_staged_save_outlives_an_outage_that_a_restore_would_not(
    client, service: RestartableService, monkeypatch, uploading
):
    monkeypatch.setenv("HOLDFAST_RETRY_SECONDS", "0.5")
    gone = threading.Event()
    state = {"notes": {"text": "a" * 100_000}}
    with holdfast.Checkpointer("tests/outage", create=True) as ckpt:
        ckpt.restore(state)
        if uploading:
            chunks = ckpt.parts.pipeline._chunks

            def cut_off(job, staged):
                service.kill9()
                gone.set()
                yield from chunks(job, staged)

            ckpt.parts.pipeline._chunks = cut_off
        else:
            service.kill9()
            gone.set()
        handle = ckpt.save(0, state)
        assert gone.wait(60)
        # What training itself asks for gives up meanwhile, as it always did.
        with Client(ClientSettings()) as own, pytest.raises(errors.ServiceUnavailable):
            own.restores.restore_point("tests", "outage")
        assert not handle.committed.done()
        service.start()
        assert handle.committed.result(timeout=120).step == 0
    assert client.restores.restore_point("tests", "outage").restore_point.step == 0
