"""Digests in the catalog are bytes, and the code writes them as lower-case hex: nothing else comes in or out."""

from __future__ import annotations

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, create_engine, insert, select, text
from sqlalchemy.exc import StatementError

from holdfast_service.db.dialect import Digest

_ROWS = Table("rows", MetaData(), Column("id", Integer, primary_key=True), Column("digest", Digest))


@pytest.fixture
def connection():
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        _ROWS.create(connection)
        yield connection
    engine.dispose()


def test_hex_comes_back_as_it_went_in_and_bytes_are_kept(connection):
    connection.execute(insert(_ROWS), [{"id": 1, "digest": "0f" * 32}, {"id": 2, "digest": None}])
    assert connection.execute(select(_ROWS.c.digest).order_by(_ROWS.c.id)).scalars().all() == ["0f" * 32, None]
    assert connection.execute(text("SELECT digest FROM rows WHERE id = 1")).scalar() == b"\x0f" * 32


def test_the_order_of_bytes_is_the_order_of_the_text(connection):
    names = [f"{number * 0x1F3D5B79:064x}"[::-1] for number in range(200)]
    connection.execute(insert(_ROWS), [{"digest": name} for name in names])
    assert connection.execute(select(_ROWS.c.digest).order_by(_ROWS.c.digest)).scalars().all() == sorted(names)


@pytest.mark.parametrize(
    "value", ["", "0f" * 31, "0f" * 33, "0F" * 32, "0f" * 31 + "0", "0f" * 31 + "0g", " " + "0f" * 32, "0f" * 32 + "\n"]
)
@pytest.mark.parametrize("as_a_list", [False, True])
def test_what_is_no_digest_is_refused_also_where_it_is_only_compared(connection, value, as_a_list):
    with pytest.raises(StatementError, match="64 lower-case hex digits"):
        connection.execute(insert(_ROWS), {"digest": value})
    compared = _ROWS.c.digest.in_([value]) if as_a_list else _ROWS.c.digest == value
    with pytest.raises(StatementError, match="64 lower-case hex digits"):
        connection.execute(select(_ROWS).where(compared))
