"""Where there is nothing, and where something fails, the page says what to do. The catalog is empty at first."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.support.service import RunningService
from tests.web.axe import grave_violations
from tests.web.screens import command, heading, settled

RUNS = re.compile(r"/v1/projects/demo/runs\?")
WITHOUT_A_PROJECT = ["", "runs", "retention", "operations/webhooks"]
EMPTY = [
    # address, what stands there, what to do
    ("", "Nothing needs attention", "No run is stalled"),
    ("", "No run is training", "opens the checkpointer"),
    ("", "There is no sample yet", "after the end of each hour"),
    ("runs", "No run is here yet", "A training script makes its run"),
    ("checkpoints", "No commit is known", "all ranks of a job have sealed"),
    ("retention", "Without a policy nothing ever expires", "Give a rule above"),
    ("retention?view=prune", "No run is here yet", "A training script makes its run"),
    ("retention?view=trash", "No whole run is in the trash", "is here until its purge"),
    ("storage", "No copy is known to be bad", "A scrub reads each copy again"),
    ("operations/events", "No event is here", "appears here by itself"),
    ("operations/webhooks", "demo has no webhook", "“New webhook” has the service call"),
    ("operations/long?kind=drill", "No operation is here", "widen them"),
    ("operations/projects?deleted=true", "No project is in the trash", "In use"),
]


def test_what_is_empty_says_what_fills_it(
    screen: Callable[..., Page], service: RunningService, refused: list[str]
) -> None:
    page = screen("")
    for address in WITHOUT_A_PROJECT:
        page.goto(f"{service.url}/ui/{address}")
        expect(page.get_by_text("No project is here yet").first).to_be_visible()
    page.goto(f"{service.url}/ui/")
    assert command(page, "the command that makes a project") == "holdfast projects create my-project"
    service.make_project("demo")
    for address, title, what_to_do in EMPTY:
        page.goto(f"{service.url}/ui/{address}")
        expect(page.get_by_text(title).first).to_be_visible()
        expect(page.get_by_text(what_to_do).first).to_be_visible()
        assert not grave_violations(page), address
    assert {each.split()[0] for each in refused} == {"404"}, "there is no policy"
    refused.clear()


def test_what_is_not_there_says_where_to_look(
    screen: Callable[..., Page], service: RunningService, refused: list[str]
) -> None:
    service.make_project("demo")
    page = screen("nowhere")
    expect(heading(page, "Nothing is here")).to_be_visible()
    page.goto(f"{service.url}/ui/runs/none?project=demo")
    expect(page.get_by_role("alert").first).to_contain_text("none")
    expect(page.get_by_text("Choose another project above")).to_be_visible()
    page.goto(f"{service.url}/ui/checkpoints/ck_{'0' * 32}")
    expect(page.get_by_role("alert")).to_contain_text("request")
    assert {each.split()[0] for each in refused} == {"404"}
    refused.clear()


def test_a_failure_of_the_service_is_told_in_its_words_and_retried_by_hand(
    screen: Callable[..., Page], service: RunningService, refused: list[str]
) -> None:
    """A fault that the real service has to be broken for: this one is told in its place."""
    service.make_project("demo")
    problem = {"type": "about:blank", "title": "Internal error", "status": 500, "code": "internal_error"}
    words = {"detail": "Report it with this request.", "retryable": False, "request_id": "req-7"}
    page = screen("operations/projects")
    page.route(
        RUNS,
        lambda route: route.fulfill(status=500, json=problem | words, content_type="application/problem+json"),
    )
    page.get_by_role("navigation", name="Screens").get_by_role("link", name="Runs").click()
    told = page.get_by_role("alert")
    expect(told).to_contain_text("Report it with this request.")
    expect(told).to_contain_text("req-7")
    assert not grave_violations(page)
    page.unroute_all()
    told.get_by_role("button", name="Retry").click()
    expect(page.get_by_text("No run is here yet")).to_be_visible()
    assert {each.split()[0] for each in refused} == {"500"}
    refused.clear()


def test_a_service_that_cannot_be_reached_is_told_and_found_again(
    screen: Callable[..., Page], service: RunningService
) -> None:
    service.make_project("demo")
    page = screen("operations/projects")
    page.clock.install()
    page.route(RUNS, lambda route: route.abort("connectionrefused"))
    page.get_by_role("navigation", name="Screens").get_by_role("link", name="Runs").click()
    told = page.get_by_role("alert").filter(has_text="No connection")
    while told.count() == 0:
        page.clock.run_for(1000)  # it tries again by itself, later each time
    expect(told).to_contain_text("Look whether it runs and whether this machine reaches it")
    page.unroute_all()
    told.get_by_role("button", name="Retry").click()
    expect(page.get_by_text("No run is here yet")).to_be_visible()


def test_a_page_without_live_events_says_so(screen: Callable[..., Page], service: RunningService) -> None:
    service.make_project("demo")
    page = screen("operations/projects")
    page.route("**/v1/events/stream*", lambda route: route.abort("connectionrefused"))
    page.reload()
    live = page.get_by_role("status").filter(has_text="Not live")
    expect(live).to_be_visible()
    live.focus()
    expect(page.get_by_role("tooltip").first).to_contain_text("The page tries again by itself")


def test_a_screen_whose_files_do_not_come_is_told_and_loaded_again(
    screen: Callable[..., Page], service: RunningService, refused: list[str]
) -> None:
    service.make_project("demo")
    page = screen("operations/projects")
    page.route(re.compile(r"/ui/assets/RetentionScreen.*\.js"), lambda route: route.abort("connectionrefused"))
    with page.expect_event("load"):  # the router loads the page anew by itself, once
        page.get_by_role("navigation", name="Screens").get_by_role("link", name="Retention and cost").click()
    expect(heading(page, "This screen failed")).to_be_visible()
    page.unroute_all()
    page.get_by_role("alert").get_by_role("button", name="Retry").click()
    expect(heading(page, "Retention and cost")).to_be_visible()
    settled(page)
    refused.clear()  # there is no policy
