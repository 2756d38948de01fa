"""Python's collector of garbage is paused while documents are decoded, and works again afterwards."""

from __future__ import annotations

import gc

import pytest

from holdfast_client.chunks.documents import without_collections


def test_it_works_again_after_the_last_of_two_pauses_that_overlap() -> None:
    first, second = without_collections(), without_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_it_works_again_after_an_error() -> None:
    with pytest.raises(ValueError), without_collections():
        raise ValueError
    assert gc.isenabled()


def test_it_stays_off_where_the_script_has_turned_it_off() -> None:
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
