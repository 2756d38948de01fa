"""Lists of hosts in Slurm's notation: short, read back as they were, and bounded whatever a client says."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from holdfast_protocol.text import fold_hosts, unfold_hosts

_NAMES = st.text(string.ascii_lowercase + string.digits + ".-", min_size=1, max_size=12)


def test_numbered_hosts_are_ranges() -> None:
    hosts = ["node-019", "node-017", "node-018", "node-031", "gpu7", "login", "rack2-a.corp", "rack3-a.corp"]
    assert fold_hosts(hosts, most_characters=100) == "login,gpu7,node-[017-019,031],rack[2-3]-a.corp"
    assert fold_hosts([f"node-{number}" for number in range(1, 1001)], most_characters=100) == (
        "node-[1-9],node-[10-99],node-[100-999],node-1000"
    )


@given(st.sets(_NAMES, max_size=30))
def test_a_list_is_read_back_as_it_was(hosts: set[str]) -> None:
    text = fold_hosts(hosts, most_characters=10_000)
    assert sorted(unfold_hosts(text, most=1000)) == sorted(hosts)


@given(st.text(",[]-0129a", max_size=40))
def test_any_text_is_read_to_an_end(text: str) -> None:
    assert len(unfold_hosts(text, most=50)) <= 50


def test_what_does_not_fit_is_left_out() -> None:
    scattered = [f"node-{number * number:06}" for number in range(500)]
    text = fold_hosts(scattered, most_characters=1000)
    assert 500 < len(text) <= 1000
    assert set(unfold_hosts(text, most=1000)) < set(scattered)
    assert fold_hosts(["a,b", "c[1]", ""], most_characters=10) == ""
    assert unfold_hosts("node-[0-999999999999]", most=3) == ["node-0", "node-1", "node-2"]
