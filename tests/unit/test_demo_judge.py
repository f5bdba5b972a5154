"""The judge of the demo finds what was planted, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from examples.demo_support.judge import Finding, Kill, judge
from examples.demo_support.records import Handled, Published

COMPLETE, ORDER, ALONE, REPEATS = range(4)
KILL_NS = 10_000


def published(count: int = 6, *, shard: int = 0, key: str = "key-a") -> list[Published]:
    return [Published(shard, f"{number}-0", key, number) for number in range(count)]


def handled(entry: Published, at_ns: int, *, member: str = "alpha", token: int = 1, takes_ns: int = 10) -> Handled:
    return Handled(*entry, member, (1, token), at_ns, at_ns + takes_ns)


def in_order(entries: Sequence[Published]) -> list[Handled]:
    return [handled(entry, 100 * place) for place, entry in enumerate(entries)]


def failed(findings: Sequence[Finding]) -> set[int]:
    return {place for place, finding in enumerate(findings) if not finding.ok}


def after_kill(first: int, *, pending: set[int]) -> tuple[list[Published], list[Handled], Kill]:
    """Six events; alpha handles four, is killed, and bravo goes on at `first`."""
    entries = published()
    runs = in_order(entries[:4])
    runs += [
        handled(entry, KILL_NS + 100 * place, member="bravo", token=2) for place, entry in enumerate(entries[first:], 1)
    ]
    return entries, runs, Kill("alpha", KILL_NS, frozenset((0, f"{number}-0") for number in pending))


def test_nothing_is_found_where_all_is_well() -> None:
    entries = published()
    assert failed(judge(entries, in_order(entries)[::-1], [], {})) == set()


def test_two_shards_at_once_and_equal_ids_in_both_are_fine() -> None:
    here, there = published(shard=0, key="key-a"), published(shard=1, key="key-b")
    assert failed(judge(here + there, in_order(here) + in_order(there), [], {})) == set()


def test_a_repeat_of_what_was_unacknowledged_at_the_kill_is_fine() -> None:
    entries, runs, kill = after_kill(2, pending={2, 3})
    findings = judge(entries, runs, [kill], {})
    assert failed(findings) == set()
    assert findings[REPEATS].measured == "2 of 2, 1 kill"


def test_a_second_kill_may_repeat_the_same_event_again() -> None:
    entries, runs, kill = after_kill(3, pending={3})
    runs = runs[:5]  # bravo repeated number 3 and died
    second = Kill("bravo", 2 * KILL_NS, frozenset({(0, "3-0")}))
    runs += [
        handled(entry, 2 * KILL_NS + 100 * place, member="charlie", token=3)
        for place, entry in enumerate(entries[3:], 1)
    ]
    assert failed(judge(entries, runs, [kill, second], {})) == set()


def test_finds_a_missing_event() -> None:
    entries = published()
    findings = judge(entries, in_order(entries)[:-1], [], {})
    assert failed(findings) == {COMPLETE}
    assert findings[COMPLETE].problems == ["key-a number 5 (entry 5-0 of shard 0) was never handled"]
    assert findings[COMPLETE].lines()[0] == "FAIL every published event was handled: 5 of 6"


def test_finds_an_event_that_nobody_published() -> None:
    entries = published()
    assert failed(judge(entries[:-1], in_order(entries), [], {})) == {COMPLETE}


def test_finds_an_event_that_was_handled_as_another() -> None:
    entries = published()
    runs = in_order(entries)
    runs[-1] = runs[-1]._replace(key="key-b")
    assert failed(judge(entries, runs, [], {})) == {COMPLETE}


def test_finds_what_redis_still_holds() -> None:
    entries = published()
    findings = judge(entries, in_order(entries), [], {3: "2 unacknowledged entries"})
    assert findings[COMPLETE].problems == ["Redis still holds 2 unacknowledged entries on shard 3"]


def test_finds_first_handlings_out_of_order() -> None:
    entries = published()
    findings = judge(entries, in_order([entries[0], entries[2], entries[1], *entries[3:]]), [], {})
    assert failed(findings) == {ORDER}
    assert "key-a number 1 was handled by alpha for the first time after number 2" in findings[ORDER].problems[0]


def test_finds_a_step_back_without_a_change_of_owner() -> None:
    entries, runs, kill = after_kill(2, pending={2, 3})
    again = handled(entries[2], 3 * KILL_NS, member="bravo", token=2)
    findings = judge(entries, [*runs, again], [kill], {})
    assert failed(findings) == {ORDER, REPEATS}


def test_finds_a_redelivery_that_skips_the_first_unacknowledged_event() -> None:
    entries, runs, kill = after_kill(3, pending={2, 3})
    findings = judge(entries, runs, [kill], {})
    assert failed(findings) == {ORDER}
    assert "2-0 was the first unacknowledged one" in findings[ORDER].problems[0]


def test_finds_a_repeat_of_an_acknowledged_event() -> None:
    entries, runs, kill = after_kill(2, pending={3})
    findings = judge(entries, runs, [kill], {})
    assert failed(findings) == {ORDER, REPEATS}
    assert findings[REPEATS].problems == [
        "key-a number 2 was handled by alpha and again by bravo, though it was acknowledged when alpha was killed"
    ]


def test_finds_a_repeat_without_a_kill() -> None:
    entries, runs, _ = after_kill(2, pending=set())
    findings = judge(entries, runs, [], {})
    assert failed(findings) == {REPEATS}
    assert len(findings[REPEATS].problems) == 2


def test_finds_a_repeat_before_the_kill() -> None:
    entries, runs, kill = after_kill(2, pending={2, 3})
    late = dataclasses.replace(kill, at_ns=5 * KILL_NS)
    assert REPEATS in failed(judge(entries, runs, [late], {}))


def test_finds_two_owners_at_once() -> None:
    entries = published(2)
    runs = [handled(entries[0], 100, takes_ns=500), handled(entries[1], 300, member="bravo", token=2)]
    findings = judge(entries, runs, [], {})
    assert failed(findings) == {ALONE}
    assert findings[ALONE].problems == ["alpha and bravo were at work on shard 0 at once, on 0-0 and 1-0"]


def test_shows_only_the_first_few_problems() -> None:
    lines = judge(published(20), [], [], {})[COMPLETE].lines()
    assert lines[-1].strip() == "- and 15 more"
    assert len(lines) == 7
