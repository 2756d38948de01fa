"""What each cloud announces, read from a metadata server that is as strict as the real one."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from types import SimpleNamespace

import pytest

from holdfast.preemption.clouds.aws import Aws
from holdfast.preemption.clouds.azure import Azure
from holdfast.preemption.clouds.detect import detect_cloud
from holdfast.preemption.clouds.event import CloudEvent
from holdfast.preemption.clouds.gcp import Gcp
from holdfast.preemption.clouds.metadata_server import MetadataError, MetadataServer
from holdfast.preemption.clouds.poller import CloudPoller
from holdfast.preemption.clouds.start import start_poller
from holdfast.settings import TrainerSettings
from tests.support.metadata_fakes import FakeAws, FakeAzure, FakeGcp, served
from tests.support.scripted_http import DROP, Reply, scripted


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """The fakes answer as slowly as the machine is crowded."""
    ask = MetadataServer.ask
    monkeypatch.setattr(MetadataServer, "ask", lambda *to, **of: ask(*to, **of | {"timeout_seconds": 60}))
    monkeypatch.setattr("holdfast.preemption.clouds.gcp._HOLD_SECONDS", 60)


def test_aws_tells_an_interruption_and_takes_a_new_token_when_its_own_is_refused():
    with served(FakeAws()) as (cloud, url):
        aws = Aws(MetadataServer(url))
        assert aws.look() == aws.look() == []
        assert cloud.tokens_given == 1
        cloud.forget_tokens()
        cloud.interrupt(119)
        (event,) = aws.look()
        assert not event.is_hint
        assert "terminate" in event.reason
        assert 110 < event.deadline_seconds <= 120
        assert cloud.tokens_given == 2
        assert cloud.refused == ["401 GET /latest/meta-data/spot/instance-action"]


def test_a_hibernation_of_aws_begins_at_once_and_a_rebalance_is_a_hint():
    with served(FakeAws()) as (cloud, url):
        cloud.interrupt(60, "hibernate")
        cloud.recommend_rebalance()
        hibernate, rebalance = Aws(MetadataServer(url)).look()
        assert (hibernate.deadline_seconds, hibernate.is_hint) == (None, False)
        assert (rebalance.deadline_seconds, rebalance.is_hint) == (None, True)
        cloud.interrupt(-5)
        assert Aws(MetadataServer(url)).look()[0].deadline_seconds is None


def test_the_deadline_is_measured_by_the_clouds_own_clock(monkeypatch):
    with served(FakeAws()) as (cloud, url):
        cloud.interrupt(100)
        ahead = SimpleNamespace(time=lambda: time.time() + 3600)
        monkeypatch.setattr("holdfast.preemption.clouds.metadata_server.time", ahead)
        (event,) = Aws(MetadataServer(url)).look()
        assert 90 < event.deadline_seconds <= 101


def test_gcp_tells_a_preemption_while_it_is_waited_for():
    with served(FakeGcp()) as (cloud, url):
        gcp = Gcp(MetadataServer(url))
        assert gcp.look() == []
        found: list[CloudEvent] = []
        waiting = threading.Thread(target=lambda: found.extend(gcp.look()))
        waiting.start()
        while not cloud.held_back:
            assert waiting.is_alive()
        cloud.preempt()
        waiting.join()
        (event,) = found
        assert event.deadline_seconds == 30
        assert not cloud.refused


def test_gcp_does_not_miss_what_came_between_two_looks():
    with served(FakeGcp()) as (cloud, url):
        gcp = Gcp(MetadataServer(url))
        gcp.look()
        cloud.preempt()
        assert [event.key for event in gcp.look()] == ["preempted"]
        assert cloud.held_back == 0


def test_gcp_leaves_live_migration_out_and_tells_termination():
    with served(FakeGcp()) as (cloud, url):
        gcp = Gcp(MetadataServer(url))
        cloud.maintain("MIGRATE_ON_HOST_MAINTENANCE")
        assert gcp.look() == []
        cloud.maintain("TERMINATE_ON_HOST_MAINTENANCE")
        (event,) = gcp.look()
        assert event.deadline_seconds is None


def test_what_does_not_answer_as_google_is_not_believed():
    with served(FakeGcp()) as (cloud, url):
        cloud.preempt()
        cloud.flavor = {}
        with pytest.raises(MetadataError, match="not Google's"):
            Gcp(MetadataServer(url)).look()


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_azure_tells_what_ends_the_process_and_acknowledges_nothing(kind):
    with served(FakeAzure()) as (cloud, url):
        azure = Azure(MetadataServer(url))
        cloud.schedule(kind, 45)
        (event,) = azure.look()
        assert 40 < event.deadline_seconds <= 46
        cloud.begin()
        (begun,) = azure.look()
        assert (begun.key, begun.deadline_seconds) == (event.key, None)
        assert not cloud.acknowledged
        assert not cloud.refused


def test_azure_leaves_out_a_freeze_and_what_happens_to_other_machines():
    with served(FakeAzure()) as (cloud, url):
        azure = Azure(MetadataServer(url))
        cloud.schedule("Freeze", 900)
        assert azure.look() == []
        cloud.schedule("Preempt", 30, resources=("trainer_1", "trainer_2"))
        assert azure.look() == []
        cloud.schedule("Preempt", 30, resources=("trainer_1", "TRAINER_0"))
        assert len(azure.look()) == 1


@pytest.mark.parametrize("source", [Aws, Gcp, Azure])
@pytest.mark.parametrize(
    "reply", [DROP, Reply(500), Reply(403), Reply(200, b"<html>", {"Metadata-Flavor": "Google"})], ids=str
)
def test_a_metadata_server_that_answers_nonsense_announces_nothing(source, reply):
    with scripted(lambda _: reply) as server, contextlib.suppress(MetadataError):
        assert source(MetadataServer(server.url)).look() == []


def test_no_proxy_is_asked(monkeypatch):
    with served(FakeAws()) as (cloud, url):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        cloud.interrupt(60)
        assert len(Aws(MetadataServer(url)).look()) == 1


@pytest.mark.parametrize(
    ("firmware", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2", "product_name": "p5.48xlarge"}, "aws"),
        ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gcp"),
        ({"sys_vendor": "Google", "product_name": "Eve"}, None),
        (
            {"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"},
            "azure",
        ),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}, None),
        ({"sys_vendor": "Dell Inc."}, None),
        ({}, None),
    ],
    ids=str,
)
def test_the_cloud_is_seen_by_the_machines_firmware(tmp_path, firmware, cloud):
    for name, text in firmware.items():
        (tmp_path / name).write_text(text + "\n")
    assert detect_cloud(tmp_path) == cloud
    assert detect_cloud(tmp_path / "absent") is None


class Scripted:
    """A source that says what the test put in, look by look, and then the last thing for ever."""

    name = "cloud"
    pause_seconds = 0.001

    def __init__(self, *looks):
        self.left = list(looks)
        self.seen_all = threading.Event()

    def look(self):
        now = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        if len(self.left) == 1:
            self.looks_after = getattr(self, "looks_after", 0) + 1
            if self.looks_after > 2:
                self.seen_all.set()
        if isinstance(now, Exception):
            raise now
        return now


def polled(*looks, lead_seconds=300.0):
    """The notices and the hints that a poller gives, once it has seen all looks."""
    notices, hints = [], []
    source = Scripted(*looks)
    poller = CloudPoller(
        source,
        MetadataServer("http://127.0.0.1:9"),
        on_notice=notices.append,
        on_hint=hints.append,
        lead_seconds=lead_seconds,
    )
    assert source.seen_all.wait(60)
    poller.close()
    return notices, hints


def test_a_poller_gives_each_event_once_and_a_far_one_only_when_it_comes_near():
    near, unknown = CloudEvent("near", "soon", 100.0), CloudEvent("unknown", "some time", None)
    hint = CloudEvent("hint", "maybe", None, is_hint=True)
    far = CloudEvent("far", "in a week", 600_000.0)
    notices, hints = polled([far], [far, near, hint], [far, near, hint, unknown], [far, hint])
    assert [(notice.reason, notice.deadline_seconds) for notice in notices] == [("soon", 100.0), ("some time", None)]
    assert [notice.reason for notice in hints] == ["maybe"]
    notices, _ = polled([far], [CloudEvent("far", "in a week", 299.0)], [])
    assert [notice.reason for notice in notices] == ["in a week"]


def test_a_metadata_server_that_is_unavailable_is_said_once_and_asked_on(caplog):
    caplog.set_level("INFO", logger="holdfast")
    away = MetadataError("it does not answer")
    notices, _ = polled(away, away, away, [], [CloudEvent("late", "soon", 10.0)])
    assert [notice.reason for notice in notices] == ["soon"]
    said = [record.getMessage() for record in caplog.records if "cloud" in record.getMessage()]
    assert len([line for line in said if "no notice" in line]) == 1
    assert len([line for line in said if "answers again" in line]) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_log_handler_that_raises_costs_no_notice_of_the_cloud():
    raised = []

    def raising(record):
        raised.append(record)
        raise BrokenPipeError("the script's log is gone")

    logger = logging.getLogger("holdfast")
    logger.addFilter(raising)
    try:
        notices, _ = polled(MetadataError("it does not answer"), [CloudEvent("late", "soon", 10.0)], [])
    finally:
        logger.removeFilter(raising)
    assert raised
    assert [notice.reason for notice in notices] == ["soon"]


def test_a_poller_ends_in_the_middle_of_a_request():
    asked = threading.Event()
    release = threading.Event()

    def hold(_):
        asked.set()
        release.wait(120)
        return Reply(200)

    with scripted(hold) as server:
        metadata = MetadataServer(server.url)
        source = Azure(metadata)
        source._machine = "known"  # the next request is the one that may take minutes
        poller = CloudPoller(source, metadata, on_notice=print, on_hint=print, lead_seconds=0)
        assert asked.wait(60)
        poller.close()
        poller._thread.join(60)
        assert not poller._thread.is_alive()
        release.set()


@pytest.mark.parametrize(("setting", "left", "saved"), [("save", 0, 1), ("leave", 1, 0), ("ignore", 0, 0)])
def test_a_rebalance_recommendation_is_a_reason_to_save_unless_the_user_says_otherwise(
    monkeypatch, setting, left, saved
):
    monkeypatch.setattr(Aws, "pause_seconds", 0.01)
    notices, saves = [], []
    with served(FakeAws()) as (cloud, url):
        cloud.recommend_rebalance()
        settings = TrainerSettings(preemption_cloud="aws", metadata_url=url, preemption_rebalance=setting)
        ranks = SimpleNamespace(rank=0, host_leader=0)
        poller = start_poller(ranks, settings, on_notice=notices.append, save_soon=lambda: saves.append(1))
        while cloud.looks < 3:
            assert poller._thread.is_alive()
        poller.close()
    assert (len(notices), len(saves)) == (left, saved)


def test_one_rank_of_a_node_asks_and_none_where_the_user_says_none(monkeypatch):
    def start(rank, cloud):
        settings = TrainerSettings(preemption_cloud=cloud, metadata_url="http://127.0.0.1:9")
        ranks = SimpleNamespace(rank=rank, host_leader=8)
        return start_poller(ranks, settings, on_notice=print, save_soon=print)

    before = set(threading.enumerate())  # those of earlier tests may end meanwhile
    assert start(9, "aws") is None
    assert start(8, "none") is None
    assert set(threading.enumerate()) <= before
    poller = start(8, "gcp")
    assert poller is not None
    poller.close()
