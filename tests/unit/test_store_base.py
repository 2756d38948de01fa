"""Keys and names become paths: nothing from outside may leave the store."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_protocol.problems import ProblemCode
from holdfast_service.stores.base import (
    ObjectKey,
    ObjectMissing,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    validated_name,
)
from holdfast_service.stores.posix.files import store_errors
from holdfast_service.stores.problems import store_problem

_DIGEST = "ab" * 32


def test_the_path_of_a_key():
    key = ObjectKey("p-1", _DIGEST, "0123456789abcdef" * 2)
    assert key.path == f"p-1/chunks/ab/{_DIGEST}/0123456789abcdef0123456789abcdef"
    assert ObjectKey.from_path(key.path) == key


@pytest.mark.rule("drop-box")
@given(st.text(max_size=80), st.text(max_size=80), st.text(max_size=80))
def test_a_key_is_refused_or_stays_in_its_place(project_id, digest, generation):
    try:
        path = ObjectKey(project_id, digest, generation).path
    except ValueError:
        return
    assert path == f"{project_id}/chunks/{digest[:2]}/{digest}/{generation}"
    assert path.isascii()
    assert path.count("/") == 4
    assert "." not in path


@pytest.mark.parametrize(
    "parts",
    [
        ("../p", _DIGEST, "0" * 32),
        ("", _DIGEST, "0" * 32),
        ("P", _DIGEST, "0" * 32),
        ("p\n", _DIGEST, "0" * 32),
        ("p", _DIGEST.upper(), "0" * 32),
        ("p", _DIGEST[:-1], "0" * 32),
        ("p", _DIGEST + "\n", "0" * 32),
        ("p", _DIGEST, "0" * 31),
        ("p", _DIGEST, "../../x"),
        ("p", _DIGEST, "00000000.sha256"),
    ],
)
def test_a_bad_part_is_refused(parts):
    with pytest.raises(ValueError, match="is "):
        ObjectKey(*parts)


@pytest.mark.parametrize("path", ["", "a/b", f"p/chunks/cd/{_DIGEST}/{'0' * 32}", f"p/other/ab/{_DIGEST}/{'0' * 32}"])
def test_a_path_that_is_no_keys_is_refused(path):
    with pytest.raises(ValueError, match="not the path"):
        ObjectKey.from_path(path)


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/.hidden", "p/chunks/x", "incoming/x", "proofs/x", "a/b\n"]
)
def test_a_name_that_leaves_its_place_is_refused(name):
    with pytest.raises(ValueError, match="no name"):
        validated_name(name)


@pytest.mark.parametrize(
    ("number", "expected", "code", "retryable"),
    [
        (errno.ENOSPC, StoreFull, ProblemCode.STORE_FULL, False),
        (errno.EDQUOT, StoreFull, ProblemCode.STORE_FULL, False),
        (errno.EROFS, StoreRefused, ProblemCode.STORE_REFUSED, False),
        (errno.EACCES, StoreRefused, ProblemCode.STORE_REFUSED, False),
        (errno.EIO, StoreUnavailable, ProblemCode.STORE_UNAVAILABLE, True),
        (errno.ESTALE, StoreUnavailable, ProblemCode.STORE_UNAVAILABLE, True),
        (errno.ENOENT, ObjectMissing, ProblemCode.CHUNK_GONE, False),
    ],
)
def test_what_a_filesystem_error_means(tmp_path, number, expected, code, retryable):
    (tmp_path / "incoming").mkdir()
    with pytest.raises(expected) as raised, store_errors(tmp_path):
        raise OSError(number, "as the system says it")
    assert raised.value.retryable is retryable
    assert store_problem(raised.value).code is code


def test_without_the_stores_own_folder_nothing_is_called_missing(tmp_path):
    with pytest.raises(StoreUnavailable, match="mounted"), store_errors(tmp_path):
        raise FileNotFoundError(errno.ENOENT, "no such file")
