"""`lua/lib/position.lua`: arithmetic on entry ids, whose parts are larger than Lua's whole numbers."""

from __future__ import annotations

import functools

from hypothesis import example, given
from hypothesis import strategies as st

from tests.lua import load_library

position = load_library("position")
PARTS = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 30), st.integers(2**53 - 3, 2**53 + 3))
IDS = st.tuples(PARTS, PARTS)


def text(entry_id: tuple[int, int]) -> str:
    return f"{entry_id[0]}-{entry_id[1]}"


@given(IDS)
@example((0, 0))
@example((0, 1))
@example((1, 0))
@example((10, 0))
@example((5, 2**64 - 1))
@example((5, 10**19))
@example((10**15, 0))
def test_the_id_just_before(entry_id: tuple[int, int]) -> None:
    ms, seq = entry_id
    expected = divmod(max(0, ms * 2**64 + seq - 1), 2**64)
    assert position.before(text(entry_id)) == text(expected)


@given(IDS, IDS)
@example((9, 0), (10, 0))
@example((10, 9), (10, 10))
@example((7, 7), (7, 7))
def test_ids_are_compared_as_numbers(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert position.less(text(one), text(other)) == (one < other)


@given(st.lists(IDS, min_size=1, max_size=20))
def test_the_order_is_total(ids: list[tuple[int, int]]) -> None:
    by_lua = sorted(map(text, ids), key=functools.cmp_to_key(lambda a, b: position.less(b, a) - position.less(a, b)))
    assert by_lua == [text(entry_id) for entry_id in sorted(ids)]
