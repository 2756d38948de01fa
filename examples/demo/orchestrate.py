"""The demo: train, be killed twice, resume, and compare bit for bit with a run that was not interrupted.

    make demo [STORE=posix|s3|azure] [DATABASE=sqlite|postgres] [LOOK=yes]

The plan, in order; each line is a function below:
    1. a service starts, with two stores, a catalog and policies of its own
    2. `uninterrupted`    two ranks train without any pause: the reference
    3. `killed_between`   a second run is killed with SIGKILL between two saves
    4. `killed_uploading` the same command again; killed while a save is uploading, as the catalog tells
    5. `finished`         the same command again; it goes on to the end
    6. `compare`          every loss and every parameter against the reference
    7. `on_one_rank`      the two-rank checkpoint resumed on one rank: the same state, and training goes on
    8. `from_second`      the newest checkpoint restored from the second store alone, every byte verified
With LOOK=yes the service then stays until Ctrl-C; one line has the link to its web page, and one the command that makes
another. The last line is
`demo: PASS …` or `demo: FAIL …`, with exit code 0 or 1.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tests.support starts the real servers

from checks import CheckFailedError, resumed_where_saved, same_state, same_steps, went_on
from journal import read_journal
from launches import Launch, launch_environment, torchrun
from moments import Catalog, LaunchFailedError, between_saves, wait_for
from screen import Screen
from tests.support.serve import HOLDFAST, ServedHoldfast, holdfast_serve, without_holdfast_settings
from tests.support.store_servers import STORES

from holdfast_client import Client, ClientSettings
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.policies.policy import PolicyKind
from holdfast_protocol.runs import EditProject
from holdfast_protocol.states import CheckpointState


@dataclass(frozen=True)
class Scale:
    """How much is trained. `steps` is a multiple of `save_every`, so that the last step is saved."""

    steps: int
    more_steps_on_one_rank: int
    save_every: int
    width: int
    layers: int


# A shell's background job ignores Ctrl-C from the start, and can be told to stop all the same; under nohup, SIGHUP not.
_INTERRUPTIONS = [signal.SIGINT, signal.SIGTERM]
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    _INTERRUPTIONS.append(signal.SIGHUP)
FULL = Scale(steps=32, more_steps_on_one_rank=8, save_every=8, width=384, layers=6)
# Five saves, six short steps apart: on a busy machine the moments to kill at are missed now and then.
QUICK = Scale(steps=30, more_steps_on_one_rank=3, save_every=6, width=256, layers=4)


PROJECT = "demo"
_LOST_AFTER_SECONDS = 30  # a heartbeat each three seconds: a launch of this size is over before the usual first one
_QUOTA_BYTES = 4 * 10**9
_POLICIES: dict[PolicyKind, dict[str, object]] = {
    PolicyKind.RETENTION: {"keep_last": 2, "keep_best": [{"metric": "loss", "mode": "min"}]},
    PolicyKind.COPIES: {},  # of every checkpoint
    PolicyKind.OBJECTIVES: {"rpo_seconds": 60, "rto_seconds": 60},
}


@dataclass
class Run:
    """One training run of the demo: its name in the catalog, its journal and the command of its launches."""

    name: RunName
    folder: Path
    scale: Scale
    service: ServedHoldfast
    catalog: Catalog
    save_every: int
    launches: int = 0
    rows: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def journal(self) -> Path:
        return self.folder / self.name.run

    def launch(self, *, ranks: int = 2, steps: int | None = None) -> Launch:
        self.launches += 1
        command = torchrun(
            ranks,
            *(str(self.name), f"--steps={steps or self.scale.steps}", f"--save-every={self.save_every}"),
            *(f"--journal={self.journal}", f"--width={self.scale.width}", f"--layers={self.scale.layers}"),
        )
        environment = launch_environment(without_holdfast_settings(), self.service.environment, temporary=self.folder)
        return Launch(command, environment=environment, log=self.folder / f"{self.name.run}.log")

    def trained(self) -> int:
        """Steps of the launch that runs now."""
        launches = read_journal(self.journal)
        return len(launches[-1].steps) if len(launches) == self.launches else 0

    def note(self, ended: str) -> None:
        """Keep a row for the table."""
        record = read_journal(self.journal)[-1]
        resumed = "from nothing" if record.start == 0 else f"after step {record.start - 1}"
        self.rows.append(
            (str(self.launches), str(record.world_size), resumed, f"{record.start} to {record.last_step}", ended)
        )


def uninterrupted(run: Run, screen: Screen) -> None:
    screen.phase("uninterrupted run")
    _run_to_the_end(run, screen)
    screen.happened(f"an uninterrupted run trained {run.scale.steps} steps on 2 ranks", steps=run.scale.steps)


def killed_between(run: Run, screen: Screen) -> int:
    """Returns the step that a relaunch must resume after."""
    screen.phase("to be killed between saves")
    while True:
        with run.launch() as launch:
            moment = partial(between_saves, run.catalog, run.journal, run.launches)
            if not wait_for(launch, moment, lambda: screen.trained(run.trained())):
                raise LaunchFailedError("the run was over before there was a moment between two saves", [])
            launch.kill()
        saved = run.catalog.committed()
        if saved is not None and run.catalog.uploading() is None:
            break
        run.note("SIGKILL, as a save began")  # it began in the instant of the kill; the promise holds, but try again
    run.note("SIGKILL between saves")
    screen.happened(f"killed between saves; the newest checkpoint is of step {saved.step}", steps=run.trained())
    return saved.step


def killed_uploading(run: Run, screen: Screen, saved_step: int) -> tuple[int, CheckpointView]:
    """Returns the step that a relaunch must resume after, and the checkpoint that was uploading."""
    screen.phase("to be killed while a save is uploading")
    while True:
        with run.launch() as launch:
            seen: list[CheckpointView] = []
            if not wait_for(launch, partial(_is_uploading, run, seen), lambda: screen.trained(run.trained())):
                raise LaunchFailedError("the run was over before a save could be seen uploading", [])
            launch.kill()
        resumed_where_saved(read_journal(run.journal)[-1], saved_step=saved_step)
        # One question, because a commit whose last seal was under way can come between two.
        offered = run.catalog.restore_step()
        if offered != seen[-1].step:
            break
        saved_step = offered  # it was quicker than the kill: catch the next one
        run.note("SIGKILL, just after a commit")
    if offered != saved_step:
        raise CheckFailedError(f"the service would restore step {offered} after the kill, and not {saved_step}")
    run.note(f"SIGKILL while step {seen[-1].step} was uploading")
    screen.happened(
        f"killed while the save of step {seen[-1].step} was uploading; the service offers step {saved_step}",
        steps=run.trained(),
    )
    return saved_step, seen[-1]


def finished(run: Run, screen: Screen, saved_step: int, half_sent: CheckpointView) -> None:
    screen.phase("resumed, to the end")
    _run_to_the_end(run, screen)
    record = read_journal(run.journal)[-1]
    # The kill does not recall a request: when the service had every rank's seal by then, it still commits.
    state = run.catalog.state_of(half_sent)
    if state is CheckpointState.COMMITTED:
        saved_step = half_sent.step
    elif state is not CheckpointState.ABORTED:
        raise CheckFailedError(f"the half-sent checkpoint of step {half_sent.step} should be aborted")
    resumed_where_saved(record, saved_step=saved_step)
    run.note("finished")
    screen.happened(f"resumed after step {saved_step} and finished", steps=len(record.steps))


def compare(reference: Run, run: Run, screen: Screen) -> None:
    for rank in range(2):
        compared = same_steps(
            read_journal(reference.journal, rank), read_journal(run.journal, rank), steps=run.scale.steps
        )
    screen.happened(f"{compared} steps on 2 ranks: every loss and every parameter is equal, bit for bit")


def on_one_rank(run: Run, screen: Screen) -> None:
    screen.phase("resumed on one rank")
    steps = run.scale.steps + run.scale.more_steps_on_one_rank
    last = read_journal(run.journal)[-1].steps[-1]
    _run_to_the_end(run, screen, ranks=1, steps=steps)
    record = read_journal(run.journal)[-1]
    resumed_where_saved(record, saved_step=last.step)
    same_state(last, record)
    went_on(record, steps=steps)
    run.note("finished")
    screen.happened(
        f"the 2-rank checkpoint resumed on 1 rank: equal state, and {len(record.steps)} steps more",
        steps=len(record.steps),
    )


def from_second(run: Run, screen: Screen) -> None:
    screen.phase("restored from the second store alone")
    drill = run.catalog.drill()
    last = read_journal(run.journal)[-1].last_step
    if drill.step != last:
        raise CheckFailedError(f"the second store alone gave step {drill.step}, and not {last}")
    screen.happened(
        f"step {drill.step} restored from the second store alone: {drill.bytes / 1e6:.0f} MB verified in "
        f"{drill.seconds:.1f} s"
    )


def look(screen: Screen, client: Client, service: ServedHoldfast) -> None:
    """The service stays until a person has seen enough. The link is good for a minute; the command makes a new one, in
    any shell. On Postgres it needs the token too, which is the demo's own and goes with it."""
    code = client.tokens.sign_in_code().code
    screen.phase("the service stays until Ctrl-C")
    screen.happened(f"look at the runs, within a minute, once: {client.settings.url}/ui/#code={code}")
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in service.environment.items())
    screen.happened(f"later, in another shell: {settings} {shlex.quote(HOLDFAST)} ui")
    with suppress(KeyboardInterrupt):
        threading.Event().wait()


def demo(screen: Screen, scale: Scale, folder: Path, *, store: str, database: str, stays: bool) -> str:
    """The whole plan. Returns what the last line says; raises on the first promise that is not kept."""
    screen.phase("starting the service")
    service_settings = {
        "HOLDFAST_SECOND_STORE": f"posix://{folder / 'second'}",
        "HOLDFAST_LOST_AFTER_SECONDS": str(_LOST_AFTER_SECONDS),
    }
    with holdfast_serve(
        folder, store=store, database=database, other_settings=service_settings, forked=False
    ) as service:
        screen.happened(f"the service runs: {store} store, {database} catalog, {service.url}")
        settings = {name.removeprefix("HOLDFAST_").lower(): value for name, value in service.environment.items()}
        with Client(ClientSettings(**settings)) as client:
            client.projects.edit(PROJECT, EditProject(quota_bytes=_QUOTA_BYTES))
            for kind, document in _POLICIES.items():
                client.policies.put(kind, PROJECT, None, document)

            def run_of(name: str, save_every: int) -> Run:
                run_name = RunName(PROJECT, name)
                return Run(run_name, folder, scale, service, Catalog(client, run_name), save_every)

            reference = run_of("uninterrupted", scale.steps)
            run = run_of("gpt", scale.save_every)
            uninterrupted(reference, screen)
            saved_step = killed_between(run, screen)
            saved_step, half_sent = killed_uploading(run, screen, saved_step)
            finished(run, screen, saved_step, half_sent)
            compare(reference, run, screen)
            on_one_rank(run, screen)
            from_second(run, screen)
            newest = run.catalog.committed()
            if stays:
                look(screen, client, service)
    screen.table(("launch", "ranks", "resumed", "steps", "ended"), run.rows)
    size = 0 if newest is None else newest.logical_bytes
    return f"killed twice, nothing lost: {scale.steps} steps and {size / 1e6:.0f} MB of state equal bit for bit"


def _run_to_the_end(run: Run, screen: Screen, *, ranks: int = 2, steps: int | None = None) -> None:
    with run.launch(ranks=ranks, steps=steps) as launch:
        wait_for(launch, lambda: False, lambda: screen.trained(run.trained()))


def _is_uploading(run: Run, seen: list[CheckpointView]) -> bool:
    # What a killed launch left uploading is not this launch's: the new attempt is known by its journal.
    if len(read_journal(run.journal)) < run.launches:
        return False
    checkpoint = run.catalog.uploading()
    if checkpoint is None:
        return False
    seen.append(checkpoint)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=STORES, default="posix")
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps, for the tests")
    parser.add_argument("--look", action="store_true", help="the service stays until Ctrl-C, with a link to its page")
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL

    for interruption in _INTERRUPTIONS:
        signal.signal(interruption, _interrupt)
    began = time.monotonic()
    trained_twice = scale.save_every  # at least the steps whose save is cut off by the second kill
    total = 2 * scale.steps + trained_twice + scale.more_steps_on_one_rank
    try:
        with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder, Screen(total) as screen:
            outcome = demo(
                screen, scale, Path(folder), store=options.store, database=options.database, stays=options.look
            )
    except KeyboardInterrupt:
        return _fail("interrupted")
    except LaunchFailedError as failure:
        return _fail(str(failure), failure.said)
    except CheckFailedError as failure:
        return _fail(str(failure))
    except Exception as error:  # the last line must tell, whatever it was
        return _fail(f"{type(error).__name__}: {error}", traceback.format_exc().splitlines())
    if not options.look:
        print("look at such runs in a browser: make demo LOOK=yes", flush=True)
    print(f"demo: PASS {outcome}; {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _fail(why: str, said: Sequence[str] = ()) -> int:
    for line in said:
        print(f"  {line}", flush=True)
    print(f"demo: FAIL {' '.join(why.split())}", flush=True)
    return 1


def _interrupt(_signal: int, _frame: object) -> None:
    """Every block ends what it started; a second Ctrl-C must not interrupt that."""
    for interruption in _INTERRUPTIONS:
        signal.signal(interruption, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
