"""What people type for sizes and times, and what they read."""

from __future__ import annotations

import pytest
import typer.core
from typer.main import get_command

from holdfast_client.cli.checkpoints import lateness
from holdfast_client.cli.main import app
from holdfast_client.cli.projects import read_size
from holdfast_client.cli.show import as_bytes, as_metric
from holdfast_client.cli.tokens import read_duration
from holdfast_protocol.checkpoints import CheckpointView, MetricValue


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


@pytest.mark.parametrize("text", ["", "GB", "5 potatoes", "-5GB", "1e9", "5GiBB", "nan"])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(typer.BadParameter):
        read_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30m", 1800), ("12h", 43200), ("90d", 7776000), ("4W", 2419200), ("never", None)]
)
def test_times_are_read(text, seconds):
    assert read_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "d", "-1d", "1y"])
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
    ("pushed_by", "off_line", "word"), [(None, False, ""), (2, False, "late"), (2, True, "off line")]
)
def test_what_was_pushed_late_is_told_in_a_word(pushed_by, off_line, word):
    assert lateness(CheckpointView.model_construct(pushed_by=pushed_by, off_line=off_line)) == word


def test_every_command_but_run_prints_json_for_programs():
    def without_json(command, path):
        if isinstance(command, typer.core.TyperGroup):
            return [each for name, inner in command.commands.items() for each in without_json(inner, [*path, name])]
        return [] if any(option.name == "json" for option in command.params) else [" ".join(path)]

    assert without_json(get_command(app), []) == ["run"]
