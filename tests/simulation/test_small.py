"""Small cases: one or two shards and members, and whatever order of things hypothesis thinks of."""

from __future__ import annotations

from functools import cache

import attrs
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.simulation.chance import Chance
from tests.simulation.profile import RESHARDING, THINGS, profile
from tests.simulation.store import Store
from tests.simulation.world import World

# What changes so much that a case is not small any more.
_LARGE = {"rollback", "restore", "recreate"}
_CHOICES = st.integers(0, 40)


@cache
def _store() -> Store:
    return Store()


class Small(RuleBasedStateMachine):
    """One thing after another; then faults end, and everything has to come to rest."""

    @initialize(shards=st.integers(1, 2), members=st.integers(1, 2), takes_back=st.sampled_from((0, 40)))
    def begin(self, shards: int, members: int, takes_back: int) -> None:
        of = attrs.evolve(
            profile(0),
            shards=shards,
            groups=1,
            members=members,
            keys=2,
            trouble=15,
            duplicates=10,
            reshards=True,
            takes_back=takes_back,
        )
        self.world = World(_store(), of)
        self.world.troubled = True
        for _ in range(members):
            self._do("start", 0)

    def _do(self, name: str, seed: int) -> None:
        self.world.chance = Chance(seed)
        getattr(self.world, name)()

    @rule(name=st.sampled_from(sorted(THINGS.keys() - _LARGE | RESHARDING.keys())), seed=_CHOICES)
    def thing(self, name: str, seed: int) -> None:
        self._do(name, seed)

    @rule(seed=_CHOICES)
    def work(self, seed: int) -> None:
        self._do("work", seed)

    @rule(seed=_CHOICES)
    def beat(self, seed: int) -> None:
        self._do("beat", seed)

    @rule(seed=_CHOICES)
    def drive(self, seed: int) -> None:
        self._do("drive", seed)

    @rule(seed=_CHOICES)
    def publish(self, seed: int) -> None:
        self._do("publish", seed)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.heal()


TestSmall = Small.TestCase
TestSmall.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
