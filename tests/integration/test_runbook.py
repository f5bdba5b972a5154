"""Each command of the runbook does what it says there, against a live group, and both languages have the same ones."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from redis_stream_coord import Admin, Consumer, CoordError, Message, Monitor, Producer
from redis_stream_coord.cli.app import cli
from redis_stream_coord.cli.exits import Exit
from redis_stream_coord.keys import GroupKeys, StreamKeys
from tests.integration.commandline import WHO, Answer, CommandLine
from tests.servers import Server
from tests.waiting import eventually

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "runbook.md").read_text("utf-8")
_BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
SHARDS = 8

pytestmark = pytest.mark.parametrize("server", ["redis7"], indirect=True)

# Each section that has commands, and the test below that runs all of them.
RUN_BY = {
    "## Is it healthy?": "test_health",
    "## Looking": "test_looking",
    "## Changing things": "test_changing_things",
    "## Rebalance triage": "test_rebalance_triage",
    "## Resharding triage": "test_resharding_triage",
    "## Changing the number of shards": "test_changing_the_number_of_shards",
    "## Memory of removed shards": "test_memory_of_removed_shards",
    "## Upgrades": "test_upgrades",
    "## A shard does not move on": "test_a_shard_that_does_not_move_on",
    "## Reading again, or skipping": "test_reading_again",
    "### Keeping it": "test_keeping_metadata",
    "### Signs that it went backwards": "test_signs_that_metadata_went_backwards",
    "### It is lost, damaged, or too old": "test_metadata_is_restored",
    "### The index, routes or leases are lost": "test_index_routes_and_leases",
}


def sections(text: str) -> dict[str, str]:
    """Heading -> what stands between it and the next heading, of whatever level."""
    parts = re.split(r"^(#{1,3} .*)$", re.sub(r"```.*?```", lambda m: m[0].replace("\n#", "\n\\#"), text), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def commands(text: str) -> list[list[str]]:
    """The words of each command in the shell blocks of a text."""
    found = []
    for kind, block in _BLOCK.findall(text):
        if kind == "sh":
            lines = textwrap.dedent(block).replace("\\\n", " ").splitlines()
            found += [shlex.split(line) for line in lines if line and not line.startswith("export ")]
    return found


def blocks(page: str) -> list[tuple[str, str]]:
    return [(kind, textwrap.dedent(code)) for kind, code in _BLOCK.findall((DOCS / page).read_text("utf-8"))]


class Operator:
    """Does what the page says, on one server.

    Args:
        folder: where the files that the commands name lie.
    """

    def __init__(self, server: Server, folder: Path) -> None:
        self.run = CommandLine(server.url)
        self.folder = folder

    def does(self, heading: str, *, containing: str = "") -> list[Answer]:
        """Run the commands of a section in order, or those with some text; each has to end well."""
        chosen = [words for words in commands(sections(PAGE)[heading]) if containing in " ".join(words)]
        assert chosen, f"no command with {containing!r} in {heading!r}"
        return [self.expects(words, Exit.OK) for words in chosen]

    def expects(self, words: list[str], code: Exit) -> Answer:
        """Run one command, which has to end with a code."""
        assert words[0] == "redis-stream-coord"
        answer = self.run(*words[1:])
        assert answer.exit == code, (words, answer)
        return answer

    def answer(self, heading: str, containing: str, code: Exit = Exit.OK) -> Answer:
        """Run the one command of a section that has some text."""
        (words,) = (words for words in commands(sections(PAGE)[heading]) if containing in " ".join(words))
        return self.expects(words, code)


@pytest.fixture
def operator(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Operator:
    monkeypatch.chdir(tmp_path)
    with Admin(server.url, requested_by="tests") as admin:
        admin.create("orders", group="billing", shards=SHARDS, reason="a test")
    return Operator(server, tmp_path)


@pytest.fixture
def handled() -> list[str]:
    return []


@pytest.fixture
def consumer(server: Server, operator: Operator, handled: list[str]) -> Iterator[Consumer]:
    def handle(message: Message) -> None:
        handled.append(message.text("n"))

    with Consumer("orders", group="billing", redis=server.url, handler=handle) as consumer:
        owns(consumer, SHARDS)
        yield consumer


def owns(consumer: Consumer, shards: int) -> None:
    eventually(lambda: len(consumer.assignment) == shards, what=f"it owns {shards} shards")


def publish(server: Server, prefix: str) -> list[str]:
    names = [f"{prefix}{n}" for n in range(16)]
    with Producer("orders", redis=server.url) as producer:
        for name in names:
            producer.publish({"n": name}, key=name)
    return names


def acknowledged(server: Server) -> None:
    """Acknowledgements follow a little later than the handlers return, and the position with them."""
    with server.client(protocol=2) as client:
        eventually(
            lambda: not any(client.xpending(f"orders:{shard}", "billing")["pending"] for shard in range(SHARDS)),
            what="all are acknowledged",
        )


def handles(server: Server, handled: list[str], names: list[str]) -> None:
    eventually(lambda: sorted(handled) == sorted(names), within_seconds=20, what=f"{len(names)} entries are handled")
    acknowledged(server)


# --- the pages ------------------------------------------------------------------------------------------------------


def test_both_languages_have_the_same_commands(server: Server) -> None:
    assert blocks("runbook.md") == blocks("runbook.ko.md")
    named = re.compile(r"`(redis-stream-coord [^`]*|redis_stream_coord_[^`]*)`")
    english, korean = (set(named.findall((DOCS / page).read_text("utf-8"))) for page in ("runbook.md", "runbook.ko.md"))
    assert english == korean


def test_every_command_is_run_by_a_test(server: Server) -> None:
    with_commands = {heading for heading, text in sections(PAGE).items() if commands(text)}
    assert with_commands == set(RUN_BY)
    assert all(callable(globals().get(name)) for name in RUN_BY.values())
    for name in re.findall(r"`redis-stream-coord (\w+)", PAGE):
        assert name in cli.commands, name


def test_every_finding_of_triage_is_explained(server: Server) -> None:
    source = "".join(path.read_text("utf-8") for path in (DOCS.parent / "redis_stream_coord" / "triage").glob("*.py"))
    codes = set(re.findall(r"\"([A-Z]+(?:_[A-Z]+)*)\"", source)) - {"OK"}
    states = {"PREPARING", "CUTOVER", "REOPENING", "FAILED", "ROLLING_BACK"}
    for page in ("runbook.md", "runbook.ko.md"):
        text = (DOCS / page).read_text("utf-8")
        rows = re.findall(r"^\| (`[A-Z_`, ]+) \| \d", text, re.MULTILINE)
        explained = {code for row in rows for code in re.findall(r"\w+", row)}
        assert explained - states == codes - states, page
        assert "FAILED" in explained


# --- looking --------------------------------------------------------------------------------------------------------


def test_health(server: Server, operator: Operator, consumer: Consumer) -> None:
    plain, required = operator.does("## Is it healthy?")
    assert "Redis OK" in plain.out
    assert required.exit == Exit.OK
    consumer.stop()
    assert operator.run("health", "--members-required").exit == Exit.PROBLEMS
    with server.client(protocol=2) as client:
        client.hset(GroupKeys("orders", "billing").metadata, "shard:3", "rubbish")
    answer = operator.run("health")
    assert answer.exit == Exit.PROBLEMS
    assert "the metadata is damaged: shard:3" in answer.out


def test_looking(server: Server, operator: Operator, consumer: Consumer) -> None:
    publish(server, "a")
    with Producer("orders", redis=server.url) as producer:
        producer.publish({"n": "x"}, key="x", event_id="payment-4711")
    answers = operator.does("## Looking")
    groups, members, assignments, migrations, routing, shards, _, found, events, audit, of_stream, record = answers
    assert "orders" in groups.out
    assert consumer.member in members.out
    assert "converged" in assignments.out
    assert "never resharded" in migrations.out
    assert "8 shards by jump-v1" in routing.out
    assert len(shards.out.splitlines()) == SHARDS + 1
    assert "n=x" in found.out
    assert "member_joined" in events.out
    assert re.search(r"create\s+accepted", audit.out)
    assert of_stream.exit == Exit.OK
    assert "lease 15 s" in record.out


def test_alerts(server: Server, operator: Operator, consumer: Consumer) -> None:
    """What the table tells the operator to look at can be looked at."""
    rows = [line for line in sections(PAGE)["## Alerts"].splitlines() if line.startswith("| ")][1:]
    named = [words for row in rows for words in re.findall(r"`redis-stream-coord ([^`]*)`", row)]
    assert len(named) >= 7
    for words in named:
        assert operator.run(*words.split()).exit == Exit.OK


# --- triage ---------------------------------------------------------------------------------------------------------


def test_rebalance_triage(server: Server, operator: Operator) -> None:
    triage, *_ = operator.does("## Rebalance triage", containing="triage")
    assert "the group has no members; nothing waits" in triage.out
    assert operator.run("members", "orders", "billing").exit == Exit.OK
    assert operator.run("assignments", "orders", "billing").exit == Exit.OK
    (reconciled,) = operator.does("## Rebalance triage", containing="reconcile")
    assert "nothing was due" in reconciled.out


def test_resharding_triage(server: Server, operator: Operator, handled: list[str]) -> None:
    triage = operator.answer("## Resharding triage", "triage")
    assert "producers see 8 shards" in triage.out
    publish(server, "a")
    with Admin(server.url, requested_by="tests") as admin:
        # Nobody consumes: it waits, and can be taken back.
        admin.scale("orders", shards=9, reason="a test", wait=False)
    triage = operator.answer("## Resharding triage", "triage", Exit.PROBLEMS)
    assert "the group has no members" in triage.out
    assert "8 -> 9" in operator.run("migrations", "orders").out
    back = operator.answer("## Resharding triage", "rollback")
    assert re.search("ABANDONED|ROLLED_BACK", back.out)
    assert operator.run("routing", "orders", "--expected-shards", "8").exit == Exit.OK


# --- shards ---------------------------------------------------------------------------------------------------------


def smaller(server: Server) -> None:
    """The page scales to 8 shards."""
    with Admin(server.url, requested_by="tests") as admin:
        admin.scale("orders", shards=4, reason="a test")


def test_changing_the_number_of_shards(
    server: Server, operator: Operator, consumer: Consumer, handled: list[str]
) -> None:
    smaller(server)
    owns(consumer, 4)
    before = publish(server, "before")
    dry, scaled, waited, routing = operator.does("## Changing the number of shards")
    assert "from 4 to 8 shards" in dry.out
    assert "COMPLETED" in scaled.out
    assert "COMPLETED" in waited.out
    assert "8 shards" in routing.out
    owns(consumer, 8)
    after = publish(server, "after")
    handles(server, handled, before + after)


def test_scaling_without_duplicates(server: Server, operator: Operator, consumer: Consumer, handled: list[str]) -> None:
    """The six steps for work to which duplicates would hurt."""
    smaller(server)
    with Producer("orders", redis=server.url) as producer:
        names = [f"before{n}" for n in range(8)]
        for name in names:
            producer.publish({"n": name}, key=name)
        quiesced = producer.quiesce()  # 1 and 2: nothing of it is on the way
        assert quiesced.unknown_count == 0
        with pytest.raises(CoordError):
            producer.publish({"n": "refused"}, key="refused")
        assert operator.run("routing", "orders", "--expected-shards", "8").exit == Exit.PROBLEMS
        operator.does("## Changing the number of shards", containing="--request-id")  # 3
        operator.does("## Changing the number of shards", containing="--expected-shards")  # 4
        producer.resume()  # 5 and 6
        assert {producer.route(f"key-{n}").shard for n in range(200)} == set(range(8))
        producer.publish({"n": "after"}, key="after")
    handles(server, handled, [*names, "after"])


def test_memory_of_removed_shards(server: Server, operator: Operator, consumer: Consumer, handled: list[str]) -> None:
    handles(server, handled, publish(server, "a"))
    with Admin(server.url, requested_by="tests") as admin:
        admin.scale("orders", shards=1, reason="a test")
    with server.client(protocol=2) as client:
        there = sum(client.xlen(f"orders:{shard}") for shard in range(1, SHARDS))
        looked, dry, trimmed = operator.does("## Memory of removed shards")
        assert f"{there} entries" in looked.out
        assert f"would trim {there} entries" in dry.out
        left = [client.xlen(f"orders:{shard}") for shard in range(1, SHARDS)]
    assert f"{there - sum(left)} entries" in trimmed.out
    assert max(left) == 1 < there
    audited = operator.run("audit", "orders")
    assert re.search(rf"trim\s+accepted\s+{there} entries on {SHARDS - 1} shards", audited.out)


# --- a shard, a group -----------------------------------------------------------------------------------------------


def test_a_shard_that_does_not_move_on(
    server: Server, operator: Operator, consumer: Consumer, handled: list[str]
) -> None:
    operator.does("## A shard does not move on", containing="--to")
    with server.client(protocol=2) as client:
        client.delete("orders:3")
        operator.does("## A shard does not move on", containing="--exist-ok")
        assert client.exists("orders:3")
    names = publish(server, "again")
    handles(server, handled, names)


def test_reading_again(server: Server, operator: Operator, consumer: Consumer, handled: list[str]) -> None:
    names = publish(server, "a")
    handles(server, handled, names)
    # The time in the page is before this run.
    operator.does("## Reading again, or skipping")
    eventually(lambda: sorted(handled) == sorted(names * 2), what="all are handled again")


def test_consumer_group_that_was_destroyed_is_made_anew_where_it_was(
    server: Server, operator: Operator, consumer: Consumer, handled: list[str]
) -> None:
    before = publish(server, "before")
    handles(server, handled, before)
    with server.client(protocol=2) as client:
        for shard in range(SHARDS):
            client.xgroup_destroy(f"orders:{shard}", "billing")
    after = publish(server, "after")
    eventually(lambda: sorted(handled) == sorted(before + after), within_seconds=20, what="only what is new comes")


# --- changes from a file --------------------------------------------------------------------------------------------


def declare(folder: Path, shards: int) -> None:
    streams = {"orders": {"shards": shards, "groups": ["billing"]}}
    (folder / "groups.json").write_text(json.dumps({"version": 1, "streams": streams}))


def test_changing_things(
    server: Server, operator: Operator, consumer: Consumer, handled: list[str], tmp_path: Path
) -> None:
    declare(tmp_path, 9)
    plan, applied, audit, assignments = operator.does("## Changing things")
    assert "scale orders: 8 -> 9 shards" in plan.out
    assert "done: scale orders: 8 -> 9 shards" in applied.out
    assert "request id OPS-17" in applied.err
    assert "create" in audit.out
    assert "orders/billing" in assignments.out
    owns(consumer, 9)
    handles(server, handled, publish(server, "a"))
    # The same request again changes nothing.
    operator.does("## Changing things", containing="apply")
    assert "nothing has drifted" in operator.run("plan", "groups.json").out
    assert operator.run("apply", "groups.json").exit == Exit.USAGE


def test_apply_leaves_runtime_state_alone(
    server: Server, operator: Operator, consumer: Consumer, tmp_path: Path
) -> None:
    declare(tmp_path, SHARDS)
    with Monitor(server.url) as monitor:
        before = monitor.describe("orders", group="billing")
        operator.does("## Changing things", containing="apply")
        after = monitor.describe("orders", group="billing")
    assert (after.version, after.owners, set(after.members)) == (before.version, before.owners, set(before.members))


def test_audit_has_every_field(server: Server, operator: Operator) -> None:
    operator.run("delete", "orders", "none", "--yes", *WHO)
    operator.run("create", "orders", "billing", *WHO, "--request-id", "OPS-1")
    entry = operator.run.json("audit", "orders", "billing", "--count", "1")[0]
    assert (entry["action"], entry["outcome"], entry["word"]) == ("create", "refused", "EXISTS")
    assert (entry["requested_by"], entry["reason"], entry["request_id"]) == ("tests", "a test", "OPS-1")
    assert entry["principal"] == "default"
    assert re.fullmatch(r"127\.0\.0\.1:\d+", entry["client_address"])
    assert re.fullmatch(r"[0-9a-f]{64}", entry["fingerprint"])
    assert entry["duration_ms"] > 0
    assert (entry["fields"]["stream"], entry["fields"]["group"]) == ("orders", "billing")
    assert "WRITE" in entry["fields"]["roles"]
    assert operator.run.json("audit", "orders", "none")[0]["word"] == "GROUP_NOT_FOUND"


def test_too_many_changes_are_refused(server: Server, operator: Operator) -> None:
    assert operator.run("limit", "orders", "billing", "--mutations", "3", "--per-seconds", "600", *WHO).exit == Exit.OK
    codes = [operator.run("reconcile", "orders", "billing", *WHO).exit for _ in range(4)]
    assert codes[-1] == Exit.RATE_LIMITED
    assert "retry after" in operator.run("reconcile", "orders", "billing", *WHO).err


def test_upgrades(server: Server, operator: Operator, consumer: Consumer, tmp_path: Path) -> None:
    compatibility, backup = operator.does("## Upgrades")
    assert compatibility.out.count("fits") == 2
    assert (tmp_path / "before-upgrade.json").exists()
    assert "1 streams and 1 groups" in backup.out
    assert operator.run("health", "--members-required").exit == Exit.OK


# --- metadata -------------------------------------------------------------------------------------------------------

KEYS = GroupKeys("orders", "billing")
METADATA = KEYS.metadata
LOST = "### It is lost, damaged, or too old"


def test_keeping_metadata(server: Server, operator: Operator, consumer: Consumer, tmp_path: Path) -> None:
    whole, one = operator.does("### Keeping it")
    assert "1 streams and 1 groups" in whole.out
    assert "billing.json" in one.out
    saved = json.loads((tmp_path / "all.json").read_text())
    assert saved["streams"]["orders"]["groups"]["billing"]["record"]["group"] == "billing"
    answer = operator.run("groups", "--key-prefix", "another:prefix", "--json")
    assert answer.data == []


def test_signs_that_metadata_went_backwards(server: Server, operator: Operator, consumer: Consumer) -> None:
    operator.does("### Keeping it", containing="all.json")
    for answer in operator.does("### Signs that it went backwards"):
        assert "everything fits together" in answer.out
    with server.client(protocol=2) as client:
        client.hset(METADATA, "version", "1")
        eventually(
            lambda: any(fields["type"] == "metadata_regression" for _, fields in client.xrange(KEYS.events)),
            within_seconds=20,
            what="a member bears witness",
        )
    assert "metadata_regression" in operator.run("events", "orders", "billing", "--count", "100").out
    eventually(lambda: consumer.health.ok, within_seconds=20, what="its members have come into step")


def test_metadata_is_restored(server: Server, operator: Operator, consumer: Consumer, handled: list[str]) -> None:
    before = publish(server, "before")
    handles(server, handled, before)
    operator.does("### Keeping it", containing="all.json")
    with server.client(protocol=2) as client:
        client.delete(METADATA)
    eventually(lambda: not consumer.health.ok, within_seconds=20, what="the consumer notices")
    during = publish(server, "during")
    operator.answer(LOST, " freeze ", Exit.NOT_FOUND)
    assert operator.run("verify", "orders", "billing").exit == Exit.PROBLEMS
    operator.does(LOST, containing=" restore ")
    handles(server, handled, before + during)
    operator.does(LOST, containing="unfreeze")
    health = operator.does(LOST, containing="health")
    assert "Redis OK" in health[0].out


def test_a_group_is_frozen_while_somebody_works_on_it(server: Server, operator: Operator, consumer: Consumer) -> None:
    operator.does(LOST, containing=" freeze ")
    assert "frozen by an operator" in operator.run("health").out
    assert operator.run("retain", "orders", "--retention", "all", *WHO).exit in (Exit.OK, Exit.FROZEN)
    assert operator.run("seek", "orders", "billing", "--to", "oldest", "--yes", *WHO).exit == Exit.FROZEN
    operator.does(LOST, containing="unfreeze")
    assert operator.run("health").exit == Exit.OK


def test_a_backup_that_is_too_old_is_refused(server: Server, operator: Operator, consumer: Consumer) -> None:
    operator.does("### Keeping it", containing="all.json")
    with Consumer("orders", group="billing", redis=server.url, handler=print) as second:
        owns(second, SHARDS // 2)
    owns(consumer, SHARDS)
    with server.client(protocol=2) as client:
        client.delete(METADATA)
    answer = operator.answer(LOST, " restore ", Exit.METADATA)
    assert "ahead" in answer.err or "seen" in answer.err
    with server.client(protocol=2) as client:
        assert not client.exists(METADATA)


@pytest.mark.parametrize("damage", ["lost", "damaged", "too old"])
def test_group_is_created_anew_and_keeps_its_positions(
    server: Server, operator: Operator, consumer: Consumer, handled: list[str], damage: str
) -> None:
    before = publish(server, "before")
    handles(server, handled, before)
    with server.client(protocol=2) as client:
        if damage == "lost":
            client.delete(METADATA)
        elif damage == "damaged":
            client.hdel(METADATA, "shard:3")
        else:
            client.hset(METADATA, "incarnation", "1")
    eventually(lambda: not consumer.health.ok, within_seconds=20, what="the consumer notices")
    assert consumer.assignment == frozenset()
    during = publish(server, "during")
    assert sorted(handled) == sorted(before)
    operator.does(LOST, containing=" recreate ")
    handles(server, handled, before + during)
    assert operator.run("health", "--members-required").exit == Exit.OK


def test_index_routes_and_leases(server: Server, operator: Operator, consumer: Consumer, handled: list[str]) -> None:
    with server.client(protocol=2) as client:
        client.delete("redis-stream:coord:groups", StreamKeys("orders").shard(1).route, KEYS.leases)
    assert operator.run("verify").exit == Exit.PROBLEMS
    operator.does("### The index, routes or leases are lost")
    assert operator.run("groups", "--json").data == [{"stream": "orders", "group": "billing"}]
    handles(server, handled, publish(server, "a"))
    eventually(lambda: operator.run("verify").exit == Exit.OK, what="everything fits together")
