"""The demo as `make demo` runs it, with a smaller model: it passes, it can be looked at, with a browser and with
Prometheus, it tells a failure, it leaves nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.panels import QUERIES, Query, asked, gpus_of
from tests.support.prepare import NotHereError
from tests.support.prometheus import Prometheus, deployed_at, exporter, prometheus

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"


@contextmanager
def short_folder() -> Iterator[Path]:
    """Not tmp_path: Postgres runs as another user, who must get in, and its socket's path must be short."""
    path = Path(tempfile.mkdtemp(prefix="hf-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture
def demo_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DEMO))


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Everything that the demo starts inherits TMPDIR, by which it is found afterwards."""
    return subprocess.Popen(
        [sys.executable, str(DEMO / "orchestrate.py"), "--quick", *arguments],
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def left_behind(folder: Path) -> list[str]:
    """Processes that work in `folder`, and files in it."""
    found = [path.name for path in folder.iterdir()]
    for process in psutil.process_iter():
        try:
            belongs = (
                process.environ().get("TMPDIR", "").startswith(str(folder)) and process.status() != psutil.STATUS_ZOMBIE
            )
            found += [" ".join(process.cmdline())] if belongs else []
        except psutil.Error:
            continue
    return found


@dataclass(frozen=True)
class Ended:
    """What a demo said, and what it left behind."""

    output: str
    returncode: int
    left: list[str]

    @property
    def lines(self) -> list[str]:
        return self.output.strip().splitlines()

    def check(self) -> None:
        assert self.lines[-1].startswith("demo: PASS "), self.output
        assert self.returncode == 0
        assert re.search(r"while step \d+ was uploading", self.output)
        assert re.search(r"restored from the second store alone: \d+ MB verified", self.output)
        assert self.left == []


def end(demo: subprocess.Popen[str], folder: Path, said: str = "") -> Ended:
    """`said`: what was read of it before."""
    output, _ = demo.communicate(timeout=800)
    return Ended(said + output, demo.returncode, left_behind(folder))


@dataclass(frozen=True)
class LookedAt(Ended):
    """A demo with --look, on the default store and catalog."""

    command: str
    """What it tells to run in another shell."""
    shown: subprocess.CompletedProcess[str]
    """Of that command."""
    empty: list[str] | None
    """The panels of Grafana that showed nothing at any time; None: there is no Prometheus here."""


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LookedAt]:
    with ExitStack() as stack:
        folder = stack.enter_context(short_folder())
        demo = start(folder, "--look")
        stack.callback(demo.kill)
        assert demo.stdout is not None
        said, server = [], None
        for line in demo.stdout:
            said.append(line)
            if found := re.search(r"the service runs: .* (http://\S+)$", line):
                with suppress(NotHereError):
                    server = stack.enter_context(scraping(found[1], folder, tmp_path_factory.mktemp("prometheus")))
            if "in another shell: " in line:
                break
        assert demo.poll() is None, "".join(said)
        command = said[-1].partition("in another shell: ")[2].strip()
        bare = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        shown = subprocess.run(
            ["sh", "-c", f"{command} --no-browser"], env=bare, capture_output=True, text=True, timeout=120
        )
        empty = None if server is None else never_shown(server)
        demo.send_signal(signal.SIGINT)
        ended = end(demo, folder, "".join(said))
        yield LookedAt(ended.output, ended.returncode, ended.left, command, shown, empty)


@contextmanager
def scraping(url: str, folder: Path, place: Path) -> Iterator[Prometheus]:
    """Prometheus, as deploy/prometheus has it, beside the demo in `folder`."""
    token = next(folder.glob("holdfast-demo-*/data/token")).read_text().strip()
    with exporter(gpus_of(socket.gethostname())) as dcgm:
        configuration = deployed_at(
            place / "deployed", url.removeprefix("http://"), token, {"dcgm": f"localhost:{dcgm}"}
        )
        with prometheus(configuration, place) as server:
            yield server


def never_shown(server: Prometheus) -> list[str]:
    """What the demo did last is there after the next scrape."""
    deadline = time.monotonic() + 300
    while missing := [str(each) for each in QUERIES if not showed(server, each)]:
        if time.monotonic() > deadline:
            break
        time.sleep(1)
    return missing


def showed(server: Prometheus, query: Query) -> bool:
    """At any time of the demo: Grafana shows hours."""
    return bool(server.query(f"present_over_time((({asked(query.text)}) >= -Inf)[15m:1s])"))


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    # As the fixture `azurite` does: pip cannot install Node.js, and no other part of Holdfast needs it.
    not (shutil.which("node") and shutil.which("npm")),
    reason="Azurite needs Node.js, and this machine has none",
)
def test_the_demo_passes_on_azure_and_postgres(folder: Path) -> None:
    """tests/chaos_run, tests/jepsen and tests/soak run on S3 and Postgres, with these faults and more."""
    ended = end(start(folder, "--store", "azure", "--database", "postgres"), folder)
    ended.check()
    assert ended.lines[-2] == "look at such runs in a browser: make demo LOOK=yes"


@pytest.mark.timeout(900)
def test_the_demo_passes_by_default(looked_at: LookedAt) -> None:
    looked_at.check()


@pytest.mark.timeout(900)
def test_the_demo_says_how_to_look_from_another_shell(looked_at: LookedAt) -> None:
    assert re.search(r"within a minute, once: http://127\.0\.0\.1:\d+/ui/#code=\S+", looked_at.output)
    assert re.match(r"HOLDFAST_URL=\S+ HOLDFAST_DATA_DIR=\S+ \S+ ui$", looked_at.command)
    # Where the page is not built, for want of Node, the command says so; it has found the service and its token.
    assert re.match(r"http://127\.0\.0\.1:\d+/ui/#code=\S+\n", looked_at.shown.stdout) or (
        "has no web page" in " ".join(looked_at.shown.stderr.split())
    ), looked_at.shown


@pytest.mark.timeout(900)
def test_each_panel_of_grafana_shows_the_demo(looked_at: LookedAt) -> None:
    if looked_at.empty is None:
        # As the fixture `prometheus_tools` does: pip cannot install Prometheus, and no other part of Holdfast needs it.
        pytest.skip("there is no Prometheus here")
    assert looked_at.empty == []


def test_an_interrupted_demo_leaves_nothing_behind(folder: Path) -> None:
    demo = start(folder)
    try:
        deadline = time.monotonic() + 300
        while not list(folder.glob("holdfast-demo-*/uninterrupted/rank1.jsonl")):  # both ranks are training
            assert demo.poll() is None, demo.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        demo.send_signal(signal.SIGINT)
        output, _ = demo.communicate(timeout=200)
    finally:
        demo.kill()
    assert output.strip().splitlines()[-1] == "demo: FAIL interrupted"
    assert demo.returncode == 1
    assert left_behind(folder) == []


@pytest.mark.usefixtures("demo_modules")
class TestChecks:
    """Each check of the demo fails when what it promises is not so."""

    def test_a_run_that_equals_its_reference_passes(self) -> None:
        from checks import same_steps

        reference = [_launch(0, range(6))]
        assert same_steps(reference, [_launch(0, range(4)), _launch(2, range(2, 6))], steps=6) == 8

    @pytest.mark.parametrize("changed", [{"loss": (4.000000000000001).hex()}, {"state": "other"}])
    def test_one_differing_bit_is_seen(self, changed: dict[str, str]) -> None:
        from checks import CheckFailedError, same_steps

        resumed = _launch(2, range(2, 6))
        resumed.steps[1] = replace(resumed.steps[1], **changed)
        with pytest.raises(CheckFailedError, match="launch 2, step 3"):
            same_steps([_launch(0, range(6))], [_launch(0, range(4)), resumed], steps=6)

    def test_a_step_that_was_never_trained_is_seen(self) -> None:
        from checks import CheckFailedError, same_steps

        with pytest.raises(CheckFailedError, match="never trained step 4"):
            same_steps([_launch(0, range(6))], [_launch(0, range(4)), _launch(5, range(5, 6))], steps=6)

    def test_a_run_that_began_anew_is_seen(self) -> None:
        from checks import CheckFailedError, resumed_where_saved

        resumed_where_saved(_launch(8, [8]), saved_step=7)
        with pytest.raises(CheckFailedError, match="went on at 0"):
            resumed_where_saved(_launch(0, [0]), saved_step=7)

    def test_another_restored_state_is_seen(self) -> None:
        from checks import CheckFailedError, same_state

        saved = _launch(0, range(4)).steps[-1]
        same_state(saved, replace(_launch(4, [4]), state="state after 3"))
        with pytest.raises(CheckFailedError, match="digest"):
            same_state(saved, replace(_launch(4, [4]), state="something else"))

    def test_a_loss_that_is_not_a_number_is_seen(self) -> None:
        from checks import CheckFailedError, went_on

        launch = _launch(4, range(4, 6))
        went_on(launch, steps=6)
        launch.steps[0] = replace(launch.steps[0], loss="nan")
        with pytest.raises(CheckFailedError, match="nan"):
            went_on(launch, steps=6)


def _launch(start_step: int, steps: Iterable[int]) -> Any:
    from journal import LaunchRecord, Step

    return LaunchRecord(
        start_step, 2, "fresh", [Step(step, float(1 + step).hex(), f"state after {step}") for step in steps]
    )
