"""What people type for sizes and times, and what they read."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
import typer.core
from typer.main import get_command
from typer.testing import CliRunner

from holdfast_client.cli import output as show
from holdfast_client.cli.arguments import first, read_duration, read_lifetime, say_if_cut
from holdfast_client.cli.checkpoints import lateness
from holdfast_client.cli.main import ENTRIES, SUBJECTS, app
from holdfast_client.cli.output import as_bytes, as_metric, as_time, show_facts, show_table
from holdfast_client.cli.projects import read_count, read_size
from holdfast_client.cli.say import show_line, show_note
from holdfast_client.cli.trash import show_what_goes
from holdfast_protocol.checkpoints import CheckpointView, MetricValue
from holdfast_protocol.pruning import Deletion, FreedBytes
from holdfast_protocol.text import counted


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("500GB", 500 * 10**9),
        ("2TiB", 2 * 2**40),
        ("1.5 Gi", 3 * 2**29),
        ("1048576", 2**20),
        ("10b", 10),
        ("0", 0),
        ("none", None),
        ("None", None),
    ],
)
def test_sizes_are_read(text, count):
    assert read_size(text) == count


@pytest.mark.parametrize("text", ["", "GB", "5 potatoes", "-5GB", "1e9", "5GiBB", "nan", "0.5", "0.0001k", "9999999TB"])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(typer.BadParameter):
        read_size(text)


@pytest.mark.parametrize(
    ("text", "count"), [("500", 500), ("20k", 20_000), ("1.5M", 1_500_000), ("0", 0), ("None", None)]
)
def test_counts_are_read(text: str, count: int | None) -> None:
    assert read_count(text) == count


@pytest.mark.parametrize("text", ["", "1.5", "0.0001k", "5GB", "100b", "many", "-1", "9999999T"])
def test_what_is_not_a_whole_count_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        read_count(text)


@pytest.mark.parametrize("option", ["--quota-runs", "--soft-quota-checkpoints", "--quota-objects"])
def test_a_quota_of_one_and_a_half_is_refused_before_the_service_is_asked(option: str) -> None:
    refused = CliRunner().invoke(app, ["projects", "edit", "demo", option, "1.5"])
    assert refused.exit_code == 2
    assert "is not whole" in refused.output


@pytest.mark.parametrize(("text", "seconds"), [("30m", 1800), ("12h", 43200), ("90d", 7776000), ("4W", 2419200)])
def test_times_are_read(text, seconds):
    assert read_duration(text) == read_lifetime(text) == seconds


def test_never_is_read_of_what_need_not_end():
    assert read_lifetime("Never") is None


@pytest.mark.parametrize("text", ["", "90", "d", "-1d", "1y", "never"])
def test_what_is_not_a_time_is_refused(text):
    with pytest.raises(typer.BadParameter):
        read_duration(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KiB"), (1024**2, "1.0 MiB"), (5 * 1024**5, "5120.0 TiB")],
)
def test_sizes_are_shown(count, text):
    assert as_bytes(count) == text


def test_metrics_are_shown_as_what_they_were():
    assert as_metric(MetricValue.of(0.123456789)) == "0.123457"
    assert as_metric(MetricValue.of(float("nan"))) == "nan"
    assert as_metric(MetricValue.of(float("-inf"))) == "-inf"


@pytest.mark.parametrize(
    ("pushed_by", "detached", "word"), [(None, False, ""), (2, False, "late"), (2, True, "detached")]
)
def test_what_was_pushed_late_is_told_in_a_word(pushed_by, detached, word):
    assert lateness(CheckpointView.model_construct(pushed_by=pushed_by, detached=detached)) == word


def _commands(command=None, path=()):
    """Every command below: (its words, itself)."""
    command = command or get_command(app)
    if not isinstance(command, typer.core.TyperGroup):
        return [(" ".join(path), command)]
    return [
        found
        for name in command.list_commands(None)
        for found in _commands(command.get_command(None, name), (*path, name))
    ]


def _has(command, name):
    return any(option.name == name for option in command.params)


def test_every_command_of_the_client_prints_json_for_programs():
    without = {words for words, command in _commands() if not _has(command, "json")}
    # `launch` hands its job's own output on, `ui` opens a browser, and these are the service's own.
    verbs = "create-token raise-epoch confirm-move dashboard-role rotate-secrets migrate backup restore"
    admin = {f"admin {verb}" for verb in verbs.split()}
    assert without == {"launch", "serve", "ui", "workers run", "agent serve", *admin}


_NEEDED = {
    "list": {"limit", "json"},
    "delete": {"yes", "dry_run", "json"},
    "start": {"wait", "json"},
}


def test_a_verb_has_its_options_with_every_noun():
    lacking = {
        words: missing
        for words, command in _commands()
        for verb, needed in _NEEDED.items()
        if words.split()[-1].partition("-")[0] == verb
        and (missing := {name for name in needed if not _has(command, name)})
    }
    assert not lacking


def test_an_option_means_the_same_wherever_it_stands():
    helps = {}
    for words, command in _commands():
        for option in command.params:
            if (
                option.name in ("json", "limit", "yes", "dry_run", "reason", "wait", "deleted")
                and "--status" not in option.opts
            ):
                helps.setdefault(option.name, {}).setdefault(option.help, []).append(words)
    assert not {name: texts for name, texts in helps.items() if len(texts) > 1}


def test_the_line_of_a_verb_is_whole_in_the_help_of_its_noun():
    widest = 80 - 2 - 6  # as click lays a list of commands out
    cut = {
        words: line
        for words, command in _commands()
        for noun, _, verb in [words.partition(" ")]
        if verb
        and (verbs := ENTRIES[noun].verbs.split())
        and (line := command.get_short_help_str(widest - max(map(len, verbs)))).endswith("...")
    }
    assert not cut


def test_a_limit_asks_for_no_page_behind_the_last_item():
    asked = []

    def pages():
        for page in range(3):
            asked.append(page)
            yield from range(10)

    assert first(pages(), 10) == list(range(10))
    assert asked == [0]
    assert len(first(pages(), None)) == 30


def test_the_table_of_commands_is_what_its_modules_bring():
    group = get_command(app)
    for name, entry in ENTRIES.items():
        command = group.get_command(None, name)
        assert command is not None, name
        brought = sorted(command.commands) if isinstance(command, typer.core.TyperGroup) else []
        for verb in entry.verbs.split():
            assert command.get_command(None, verb) is not None, f"{name} {verb}"
        assert set(brought) <= set(entry.verbs.split()), "cli/main.py lists every verb"


def test_the_page_has_the_table_of_nouns_and_verbs():
    rows = [
        f"| {subject} | `{entry.name}` | {', '.join(entry.verbs.split())} | {entry.help.removesuffix('.')} |"
        for subject, entries in SUBJECTS.items()
        for entry in entries
    ]
    table = "\n".join(["| subject | noun | verbs | what it is |", "| --- | --- | --- | --- |", *rows])
    page = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert table in page, f"docs/cli.md must hold:\n{table}"


@pytest.mark.parametrize(
    ("count", "words", "text"),
    [
        (0, ("chunk",), "0 chunks"),
        (1, ("chunk",), "1 chunk"),
        (2, ("chunk",), "2 chunks"),
        (1, ("copy", "copies"), "1 copy"),
        (3, ("copy", "copies"), "3 copies"),
    ],
)
def test_one_is_not_many(count, words, text):
    assert counted(count, *words) == text


def test_times_have_seconds():
    assert as_time(datetime(2026, 11, 22, 18, 44, 19, tzinfo=UTC)) == "2026-11-22 18:44:19"


LONG_NAME = "a-project-with-a-long-name/" + "run-of-the-third-ablation-" * 5
SENTENCE = "the store says that it has no such object, and nobody knows since when it is gone " * 3


def test_off_a_terminal_a_row_is_one_line_whole(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    show_table([">step", "run", "why"], [("1", LONG_NAME, SENTENCE), ("20", "demo/gpt", "ok")], nothing="")
    show_facts([("run", LONG_NAME), ("why", SENTENCE)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert re.split(r" {2,}", lines[1].strip()) == ["1", LONG_NAME, SENTENCE.rstrip()]
    assert lines[4] == f"why  {SENTENCE.rstrip()}"


def test_in_a_terminal_text_is_folded_and_a_name_never_is(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    at = "2026-11-22 18:44:19"
    show_table(["run", "when (UTC)", "why"], [(LONG_NAME, at, SENTENCE), ("demo/gpt", at, SENTENCE)], nothing="")
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert text.count(LONG_NAME) == 1
    assert text.count(at) == 2
    assert len(text.splitlines()) > 3
    assert max(map(len, text.splitlines())) <= len(LONG_NAME) + len(at) + 24 + 3 * 2


def test_what_fits_a_terminal_stays_within_it(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    show_table(["run", "why"], [("demo/gpt", SENTENCE)], nothing="")
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.rule("limits-before-work")
def test_nothing_that_comes_from_others_reaches_the_terminal_as_a_command(capsys):
    bad = "a\x1b[2Jb\u202ec"
    show_line(bad)
    show_note(bad)
    show_table(["name", ">n"], [(bad + "\nforged", "1")], nothing="")
    show_facts([("name", bad)])
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert not set(text) & {"\x1b", "\u202e"}
        assert "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}c" in text
    assert not any(line.startswith("forged") for line in printed.out.splitlines())


@pytest.mark.rule("limits-before-work")
def test_there_is_one_place_that_prints():
    folder = Path(show.__file__).parent
    prints = re.compile(r"\bprint\(|sys\.std(out|err)\.write|\becho\(")
    found = {path.name for path in folder.rglob("*.py") if prints.search(path.read_text())}
    assert found == {"say.py", "output.py"}


@pytest.mark.parametrize(("runs", "done", "told"), [(2, False, True), (1, False, False), (2, True, False)])
def test_a_dry_run_of_several_runs_says_that_what_they_share_is_not_counted(capsys, runs, done, told):
    """Each is asked about as if the others stayed; done one after the other, the last one counts it."""
    found = [
        Deletion(
            project="demo",
            run=f"run-{number}",
            dry_run=not done,
            etag="",
            checkpoints=1,
            logical_bytes=10,
            freed=FreedBytes(bytes=0),
            in_trash=None,
        )
        for number in range(runs)
    ]
    show_what_goes("demo", found, back="", done=done)
    assert ("What only these runs share is freed, too" in capsys.readouterr().out) is told


@pytest.mark.parametrize(("shown", "told"), [(49, False), (50, True)])
def test_a_list_that_ends_at_its_limit_says_so(capsys, shown, told):
    say_if_cut([None] * shown, 50)
    assert ("There may be more" in capsys.readouterr().err) is told
