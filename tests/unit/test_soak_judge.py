"""The judge of the soak finds what was planted, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from examples.demo_support.records import Handled, Published
from tests.chaos.report import Report
from tests.chaos.samples import Sample
from tests.chaos.soak_judge import SECOND_NS, End, Evidence, Fault, Redis, slope, verdict

ACCEPTED, COMPLETE, ORDER, ALONE, REPEATS, LEAVES, CONNECTIONS, THREADS, ENTRIES, MEMORY = range(10)
THREE = {"redis-stream-coord-loop", "redis-stream-coord-orders-0", "redis-stream-coord-orders-1"}
LIVE = {"alpha": "alpha", "bravo": "mortal"}


def at(seconds: float) -> int:
    return round(seconds * SECOND_NS)


def published(count: int = 6, *, key: str = "key-a") -> list[Published]:
    return [Published(0, f"{number}-0", key, number) for number in range(count)]


def run(number: int, seconds: float, *, member: str = "alpha", token: int = 1, takes: float = 0.001) -> Handled:
    return Handled(0, f"{number}-0", "key-a", number, member, (1, token), at(seconds), at(seconds + takes))


def looks(name: str, seconds: int, **given: Any) -> list[Sample]:
    """Two a second, from 0 on."""
    usual: dict[str, Any] = {"rss_kib": 40_000, "files": 10, "threads": tuple(sorted(THREE)), "stopped": False}
    return [Sample(name=name, at_ns=at(half / 2), **(usual | given)) for half in range(2 * seconds)]


def last_word(name: str, *threads: str) -> Sample:
    return Sample(name, at(300), 40_000, 7, threads, stopped=True)


def evidence(**changes: Any) -> Evidence:
    """Nothing happened, and all is well; but for the changes."""
    quiet = Redis(6, {0: frozenset({"alpha"})}, {0: "alpha"}, frozenset(LIVE.values()))
    usual: dict[str, Any] = {
        "receipts": published(),
        "stored": published(),
        "handled": [run(number, number) for number in range(6)],
        "kills": [],
        "leaves": [End(name, at(299), at(300), 0) for name in LIVE],
        "suspensions": [],
        "outages": [],
        "left_over": {},
        "quiet": quiet,
        "after": Redis(0, {0: frozenset({"alpha"})}, {0: None}, frozenset()),
        "live": LIVE,
        "steady": {"alpha"},
        "samples": [*looks("alpha", 299), *looks("bravo", 299), *map(last_word, LIVE)],
        "warm_up_ns": at(60),
    }
    assert changes.keys() <= usual.keys()
    return Evidence(**(usual | changes))


def failed(given: Evidence) -> set[int]:
    return {place for place, finding in enumerate(verdict(given)) if not finding.ok}


def taken_over(first: int, *, last: int = 3, token: int = 2) -> list[Handled]:
    """Alpha handles up to `last`; ten seconds later bravo goes on at `first`."""
    runs = [run(number, number) for number in range(last + 1)]
    return runs + [run(number, 10 + number, member="bravo", token=token) for number in range(first, 6)]


def killed(*pending: int) -> End:
    left = frozenset((0, f"{number}-0") for number in pending)
    return End("alpha", at(8), pending=left, firsts={0: f"{min(pending)}-0"} if pending else {})


def suspended(*pending: int, seconds: tuple[float, float] = (8, 20)) -> Fault:
    left = frozenset((0, f"{number}-0") for number in pending)
    return Fault("alpha", *map(at, seconds), left, {0: f"{min(pending)}-0"} if pending else {})


def test_nothing_is_found_where_all_is_well() -> None:
    assert failed(evidence()) == set()
    assert failed(evidence(handled=evidence().handled[::-1])) == set()


def test_the_findings_say_how_much_was_looked_at() -> None:
    lines = [finding.lines()[0] for finding in verdict(evidence())]
    assert lines[COMPLETE] == "ok   every published event was handled: 6 of 6"
    assert lines[CONNECTIONS] == "ok   no connection leaked: 6 for 2 processes, 0 after they left; open files +0"
    assert lines[THREADS] == "ok   no thread leaked: 1,196 looks at live processes, 2 at the end of one"
    assert lines[MEMORY] == "ok   the memory of long-lived processes is flat: alpha 39.1 MiB, +0.00 MiB in 238 s"


# --- what was published -----------------------------------------------------------------------------------------------


def test_finds_an_accepted_event_that_is_gone() -> None:
    given = evidence(stored=published()[:-1], handled=evidence().handled[:-1])
    assert failed(given) == {ACCEPTED}
    assert verdict(given)[ACCEPTED].problems == ["key-a number 5 was accepted as 5-0 of shard 0, and is gone"]


def test_finds_an_event_that_was_stored_twice() -> None:
    twice = [*published(), Published(0, "6-0", "key-a", 5)]
    handled = [*evidence().handled, run(5, 6)._replace(id="6-0")]
    assert ACCEPTED in failed(evidence(stored=twice, handled=handled))


def test_finds_events_of_a_key_that_were_stored_out_of_order() -> None:
    first, second, *rest = published()
    stored = [first._replace(sequence=1), second._replace(sequence=0), *rest]
    given = evidence(stored=stored, receipts=stored)
    assert verdict(given)[ACCEPTED].problems == ["key-a is not stored once and in order: number 1 in place 0"]


def test_finds_an_entry_that_nobody_has_a_receipt_for() -> None:
    assert failed(evidence(receipts=published()[:-1])) == {ACCEPTED}


# --- what was handled -------------------------------------------------------------------------------------------------


def test_finds_a_lost_event() -> None:
    assert failed(evidence(handled=evidence().handled[:-1])) == {COMPLETE}
    assert failed(evidence(left_over={0: "1 unacknowledged entries"})) == {COMPLETE}


def test_finds_keys_out_of_order() -> None:
    first, second, *rest = evidence().handled
    handled = [first._replace(sequence=1, id="1-0"), second._replace(sequence=0, id="0-0"), *rest]
    assert failed(evidence(handled=handled)) == {ORDER}


def test_redelivery_after_a_kill_begins_at_the_first_unacknowledged_entry() -> None:
    assert failed(evidence(handled=taken_over(2), kills=[killed(2, 3)])) == set()
    assert failed(evidence(handled=taken_over(3), kills=[killed(2, 3)])) == {ORDER}
    assert failed(evidence(handled=taken_over(2), kills=[killed(3)])) == {ORDER, REPEATS}


def test_redelivery_after_a_suspension_that_cost_the_shard_begins_there_too() -> None:
    assert failed(evidence(handled=taken_over(4), suspensions=[suspended(4, 5)])) == set()
    skipped = evidence(handled=taken_over(5), suspensions=[suspended(4, 5)])
    assert failed(skipped) == {COMPLETE, ORDER}


def test_a_suspension_that_cost_nothing_asks_for_nothing() -> None:
    assert failed(evidence(suspensions=[suspended(4, 5, seconds=(3.5, 3.9))])) == set()


def test_finds_two_owners_at_once() -> None:
    handled = [run(0, 0, takes=2), *(run(number, number, member="bravo", token=2) for number in range(1, 6))]
    assert failed(evidence(handled=handled)) == {ALONE}


def test_one_handler_that_ran_when_its_process_was_suspended_may_overlap() -> None:
    late = run(3, 7.9, takes=12)
    handled = [*(run(number, number) for number in range(3)), late]
    handled += [run(number, 10 + number, member="bravo", token=2) for number in range(3, 6)]
    assert failed(evidence(handled=handled, suspensions=[suspended(3)])) == set()
    assert {ALONE, ORDER} & failed(evidence(handled=handled))
    # A second one is not excused: an owner that wakes up has to look whether it still is one.
    assert failed(evidence(handled=[*handled, run(4, 20.1)], suspensions=[suspended(3)])) >= {ALONE}


def test_what_only_an_overtaken_handler_handled_is_lost() -> None:
    handled = [run(number, number) for number in range(3)]
    handled += [run(3, 7.9, takes=12), *(run(number, 10 + number, member="bravo", token=2) for number in (4, 5))]
    assert failed(evidence(handled=handled, suspensions=[suspended(3)])) >= {COMPLETE}


# --- what was repeated ------------------------------------------------------------------------------------------------


def test_finds_a_repeat_that_nothing_explains() -> None:
    assert failed(evidence(handled=taken_over(3))) == {REPEATS}


def test_a_kill_explains_only_what_it_left() -> None:
    assert failed(evidence(handled=taken_over(3), kills=[killed(3)])) == set()
    other = dataclasses.replace(killed(3), name="bravo")
    assert failed(evidence(handled=taken_over(3), kills=[other])) == {REPEATS}


def test_a_suspension_explains_only_what_it_left() -> None:
    assert failed(evidence(handled=taken_over(3), suspensions=[suspended(3)])) == set()
    assert failed(evidence(handled=taken_over(3), suspensions=[suspended(4)])) == {ORDER, REPEATS}


@pytest.mark.parametrize(("seconds", "found"), [((3.1, 5), set()), ((1, 2.5), set()), ((8, 9), {REPEATS})])
def test_an_outage_explains_what_was_finished_around_it(seconds: tuple[float, float], found: set[int]) -> None:
    outage = Fault(None, *map(at, seconds))
    assert failed(evidence(handled=taken_over(3), outages=[outage])) == found


def test_a_process_that_did_not_run_is_as_if_suspended() -> None:
    samples = [one for one in evidence().samples if not (one.name == "alpha" and at(3) < one.at_ns < at(6))]
    assert failed(evidence(handled=taken_over(3), samples=samples)) == set()


# --- how processes ended ----------------------------------------------------------------------------------------------


def test_finds_a_process_that_does_not_end() -> None:
    leaves = [*evidence().leaves, End("charlie", at(8), None, None)]
    assert failed(evidence(leaves=leaves)) == {LEAVES}


def test_finds_a_process_that_ends_badly_without_a_reason() -> None:
    samples = [*evidence().samples, last_word("charlie")]
    given = evidence(leaves=[*evidence().leaves, End("charlie", at(8), at(9), 1)], samples=samples)
    assert failed(given) == {LEAVES}
    assert failed(dataclasses.replace(given, outages=[Fault(None, at(7), at(8.5))])) == set()


# --- what leaked ------------------------------------------------------------------------------------------------------


def seen(**changes: Any) -> Redis:
    return dataclasses.replace(evidence().quiet, **changes)


def test_finds_leaked_connections() -> None:
    assert failed(evidence(quiet=seen(connections=7))) == {CONNECTIONS}
    assert failed(evidence(after=dataclasses.replace(evidence().after, connections=1))) == {CONNECTIONS}


def test_finds_open_files_that_grow() -> None:
    samples = [one._replace(files=10 + one.at_ns // at(50)) if one.name == "alpha" else one for one in looks_of_all()]
    assert failed(evidence(samples=samples)) == {CONNECTIONS}


def looks_of_all() -> Sequence[Sample]:
    return list(evidence().samples)


@pytest.mark.parametrize(
    "threads",
    [
        (*THREE, "Thread-7 (run)"),
        (*THREE, "redis-stream-coord-loop"),
        (*THREE, "redis-stream-coord-orders-1"),
        ("redis-stream-coord-loop", *(f"redis-stream-coord-orders-{number}" for number in range(9))),
        (*THREE, "redis-stream-coord-router"),
        (*THREE, *2 * ["redis-stream-coord-orders-callback-0"]),
    ],
)
def test_finds_leaked_threads(threads: tuple[str, ...]) -> None:
    samples = [one._replace(threads=threads) if one.at_ns == at(200) else one for one in looks_of_all()]
    assert failed(evidence(samples=samples)) == {THREADS}


def test_a_thread_for_callbacks_is_justified() -> None:
    threads = (*THREE, "redis-stream-coord-orders-callback-0")
    assert failed(evidence(samples=[*looks("alpha", 299, threads=threads), *map(last_word, LIVE)])) == set()


def test_finds_threads_that_outlive_their_consumer() -> None:
    samples = [*looks("alpha", 299), last_word("alpha", "redis-stream-coord-loop"), last_word("bravo")]
    assert failed(evidence(samples=samples)) == {THREADS}
    assert failed(evidence(samples=looks("alpha", 299))) == {THREADS}  # nobody has said anything at its end


def test_finds_leaked_consumers_and_members() -> None:
    assert failed(evidence(quiet=seen(consumers={0: frozenset({"alpha", "ghost"})}))) == {ENTRIES}
    assert failed(evidence(quiet=seen(members=frozenset({*LIVE.values(), "ghost"})))) == {ENTRIES}
    assert failed(evidence(quiet=seen(members=frozenset({"alpha"})))) == {ENTRIES}
    assert failed(evidence(after=dataclasses.replace(evidence().after, members=frozenset({"ghost"})))) == {ENTRIES}


def test_finds_memory_that_grows() -> None:
    def growing(kib_per_second: float) -> Evidence:
        grown = [
            one._replace(rss_kib=round(one.rss_kib + kib_per_second * one.at_ns / SECOND_NS)) for one in looks_of_all()
        ]
        return evidence(samples=grown)

    assert failed(growing(25)) == {MEMORY}
    assert failed(growing(2)) == set()
    # One that is not meant to live long may be younger than its memory's warm-up: it is not judged.
    assert failed(dataclasses.replace(growing(25), steady=set())) == set()


def test_a_single_jump_is_no_slope() -> None:
    jump = [one._replace(rss_kib=one.rss_kib + (20_000 if one.at_ns > at(200) else 0)) for one in looks("alpha", 299)]
    assert slope(jump) == 0.0
    assert slope([]) == 0.0


# --- the report -------------------------------------------------------------------------------------------------------


def test_a_report_is_good_only_with_findings_and_without_trouble() -> None:
    assert not Report().ok
    good = Report(findings=verdict(evidence()))
    assert good.ok
    assert not dataclasses.replace(good, trouble=["the producer ended with 1"]).ok
    bad = Report(findings=verdict(evidence(handled=[])), summary="seed 7", logs="--- alpha\nboom")
    assert not bad.ok
    assert "FAIL every published event was handled: 0 of 6" in str(bad)
    assert str(bad).endswith("seed 7\nwhat the processes said:\n--- alpha\nboom")
