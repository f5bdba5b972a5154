"""What users import: the names, that both faces agree, and that everything says what it does."""

from __future__ import annotations

import inspect
import re
from importlib import resources
from typing import Any

import pytest

import redis_stream_coord as package
from redis_stream_coord.errors import CoordError

NAMES = [
    "Admin",
    "AdminError",
    "AlreadyExistsError",
    "AssignmentView",
    "AsyncAdmin",
    "AsyncConsumer",
    "AsyncMonitor",
    "AsyncProducer",
    "AuditEntry",
    "Backup",
    "Batch",
    "Change",
    "Collector",
    "Compatibility",
    "ConfigError",
    "ConflictError",
    "Consumer",
    "ConsumerView",
    "CoordError",
    "CorruptMetadataError",
    "DeadLetter",
    "Desired",
    "DesiredStream",
    "Discrepancy",
    "DrainTimeoutError",
    "DuplicateMemberError",
    "EventEntry",
    "FenceView",
    "FencedError",
    "Finding",
    "FrozenError",
    "GroupDrain",
    "GroupHealth",
    "GroupView",
    "Health",
    "Layout",
    "LifecycleError",
    "MemberView",
    "MembershipError",
    "Message",
    "MetadataError",
    "MetadataRegressionError",
    "Monitor",
    "NoShardError",
    "NotFoundError",
    "Outgoing",
    "PartialPublishError",
    "PendingView",
    "PermissionDeniedError",
    "Plan",
    "Poison",
    "Producer",
    "PublishError",
    "Quiesced",
    "RateLimitedError",
    "Receipt",
    "RecordCompatibility",
    "RedisSettings",
    "RedisUnavailableError",
    "RemovedShard",
    "Resharding",
    "Retry",
    "RevokeProgress",
    "RoundView",
    "Route",
    "RouteView",
    "Router",
    "RoutingError",
    "RoutingRegressionError",
    "RoutingUnavailableError",
    "RoutingView",
    "ScalePlan",
    "ShardReading",
    "ShardStatus",
    "ShardView",
    "StoredEntry",
    "SystemHealth",
    "Timings",
    "Trimmed",
    "UnsupportedProtocolError",
    "UnsupportedSchemaError",
    "WaitTimeoutError",
    "Waiting",
]

PAIRS = [
    (package.Consumer, package.AsyncConsumer),
    (package.Producer, package.AsyncProducer),
    (package.Admin, package.AsyncAdmin),
    (package.Monitor, package.AsyncMonitor),
]

# What one face has and the other has not, and why.
ONLY_SYNC_PARAMETERS = {("Consumer", "__init__"): {"handler_threads"}}  # coroutines need no threads
# Two names of one thing, each after the language's own.
RENAMED = {
    "__enter__": "__aenter__",
    "__exit__": "__aexit__",
    "__iter__": "__aiter__",
    "__next__": "__anext__",
}
# Parameters whose kind of function differs, which is the point of having two faces.
FUNCTIONS = {"handler", "poison", "on_assigned", "on_revoked", "on_lost"}
# What only the library itself passes.
INTERNAL = {"Message": {"ack", "owned"}}
# Plain on both faces: they only look, or only begin something.
PLAIN = {"__init__", "request_stop", "pause", "resume", "member", "assignment", "health"}


def public(kind: type) -> dict[str, Any]:
    """The public members of a class, those of its bases included, and its context manager and iterator."""
    found = {}
    for name, value in inspect.getmembers_static(kind) if hasattr(inspect, "getmembers_static") else _members(kind):
        if name in RENAMED or name in RENAMED.values() or name == "__init__" or not name.startswith("_"):
            found[name] = value
    return found


def _members(kind: type) -> list[tuple[str, Any]]:
    return [(name, inspect.getattr_static(kind, name)) for name in dir(kind)]


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


# --- names ----------------------------------------------------------------------------------------------------------


def test_the_public_names_are_pinned() -> None:
    """Adding one is a decision: add it here too, and to the changelog. Taking one away breaks users."""
    assert package.__all__ == NAMES


def test_they_are_sorted_and_exist() -> None:
    assert sorted(package.__all__) == package.__all__
    assert all(hasattr(package, name) for name in package.__all__)


def test_nothing_else_is_public() -> None:
    public_names = {name for name, value in vars(package).items() if not name.startswith("_")}
    modules = {name for name in public_names if inspect.ismodule(getattr(package, name))}
    assert public_names - modules == set(NAMES)


def test_every_error_that_can_be_raised_can_be_imported() -> None:
    def below(kind: type[CoordError]) -> set[type[CoordError]]:
        return {kind}.union(*(below(one) for one in kind.__subclasses__()))

    ours = {kind.__name__ for kind in below(CoordError) if kind.__module__ == "redis_stream_coord.errors"}
    assert ours <= set(NAMES)


def test_the_package_is_typed() -> None:
    assert (resources.files(package) / "py.typed").is_file()


# --- two faces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sync", "asynchronous"), PAIRS, ids=lambda kind: kind.__name__)
def test_both_faces_have_the_same_members(sync: type, asynchronous: type) -> None:
    expected = {RENAMED.get(name, name) for name in public(sync)}
    assert set(public(asynchronous)) == expected


@pytest.mark.parametrize(("sync", "asynchronous"), PAIRS, ids=lambda kind: kind.__name__)
def test_both_faces_take_the_same_parameters(sync: type, asynchronous: type) -> None:
    for name, member in public(sync).items():
        other = public(asynchronous)[RENAMED.get(name, name)]
        if isinstance(member, property):
            assert isinstance(other, property), name
            continue
        exceptions = ONLY_SYNC_PARAMETERS.get((sync.__name__, name), set())
        mine = [parameter for parameter in parameters(member) if parameter[0] not in exceptions]
        assert mine == parameters(other), f"{sync.__name__}.{name}"


@pytest.mark.parametrize(("sync", "asynchronous"), PAIRS, ids=lambda kind: kind.__name__)
def test_both_faces_return_the_same(sync: type, asynchronous: type) -> None:
    def clean(annotation: str) -> str:
        return annotation.replace("AsyncGenerator[Message, None]", "Generator[Message, None, None]").replace(
            "Async", ""
        )

    for name, member in public(sync).items():
        other = public(asynchronous)[RENAMED.get(name, name)]
        if isinstance(member, property):
            member, other = member.fget, other.fget
        returned = (inspect.signature(one).return_annotation.replace("_Self", sync.__name__) for one in (member, other))
        assert len({clean(annotation) for annotation in returned}) <= 1, name


@pytest.mark.parametrize(("sync", "asynchronous"), PAIRS, ids=lambda kind: kind.__name__)
def test_annotations_differ_only_where_functions_are_taken(sync: type, asynchronous: type) -> None:
    for name, member in public(sync).items():
        other = public(asynchronous)[RENAMED.get(name, name)]
        if isinstance(member, property):
            continue
        its = inspect.signature(other).parameters
        for parameter in inspect.signature(member).parameters.values():
            if parameter.name in its and parameter.name not in {"self", *FUNCTIONS}:
                assert parameter.annotation == its[parameter.name].annotation, f"{name}({parameter.name})"


@pytest.mark.parametrize(("sync", "asynchronous"), PAIRS, ids=lambda kind: kind.__name__)
def test_what_waits_is_a_coroutine_on_one_face_and_never_on_the_other(sync: type, asynchronous: type) -> None:
    for name, member in public(sync).items():
        other = public(asynchronous)[RENAMED.get(name, name)]
        assert not inspect.iscoroutinefunction(member), name
        if name not in PLAIN and name != "__iter__":
            assert inspect.iscoroutinefunction(other), name


# --- what they say --------------------------------------------------------------------------------------------------


def callables() -> list[tuple[str, Any, str]]:
    """Everything public that can be called: its name, itself, and where its parameters are described."""
    found = []
    for name in NAMES:
        kind = getattr(package, name)
        if issubclass(kind, BaseException):
            continue
        found.append((name, kind.__init__, kind.__doc__ or ""))
        for member, value in public(kind).items():
            function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if inspect.isfunction(function) and not member.startswith("__"):
                found.append((f"{name}.{member}", function, function.__doc__ or ""))
    return found


def described(doc: str) -> set[str]:
    """The names that stand under "Parameters:" or "Attributes:", or right behind it."""
    names: set[str] = set()
    for section in re.split(r"\n\s*\n|(?=Returns:|Raises:)", doc):
        match = re.search(r"(?:Parameters|Attributes):(.*)", section, re.DOTALL)
        for line in match[1].splitlines() if match else []:
            if before := re.match(r"\s*([\w, ]+?):(?:\s|$)", line):
                names.update(re.split(r",\s*", before[1]))
            else:
                names.update(re.findall(r"\w+(?=,)|\w+(?=:)", line))
    return names


@pytest.mark.parametrize(
    ("name", "function", "doc"), callables(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_everything_public_says_what_it_does_and_takes(name: str, function: Any, doc: str) -> None:
    assert doc.strip(), f"{name} has no docstring"
    # Face two may refer to face one, which says it in full.
    if re.search(r"see `\w|[Pp]arameters as|as `\w", doc):
        return
    missing = {
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in ("self", "cls") and not parameter.name.startswith("_")
    } - described(doc)
    # A short docstring may name them in its sentence.
    mentioned = {parameter for parameter in missing if re.search(rf"\b{parameter}\b", doc)}
    assert missing - mentioned - INTERNAL.get(name, set()) == set(), f"{name} does not say what these are"


@pytest.mark.parametrize("name", NAMES)
def test_every_class_and_property_has_a_docstring(name: str) -> None:
    kind = getattr(package, name)
    assert (inspect.getdoc(kind) or "").strip()
    for member, value in public(kind).items():
        if isinstance(value, property):
            assert (value.__doc__ or "").strip(), f"{name}.{member}"


def test_the_package_says_where_to_begin() -> None:
    assert package.__doc__ is not None
    for name in ("Admin.create", "Producer.publish", "Consumer.run"):
        assert name in package.__doc__
