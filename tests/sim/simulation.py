"""A simulation: one seed decides sizes, paces, faults and every step; the same seed gives the same trace."""

from __future__ import annotations

import hashlib
import logging
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from tests.sim.rare import RARE
from tests.sim.requests import Requests
from tests.sim.sequences import SEQUENCES, Sequence
from tests.sim.verbs import VERBS, Verb
from tests.sim.world import SPACES, World, draw_setup

STEPS = 120
DIRECTED = 0.15
"""Share of steps that are directed sequences."""


class SeedFailed(AssertionError):
    """A simulation went wrong. The message says how to see it again."""


def simulate(seed: int, steps: int = STEPS, say: Callable[[str], None] = lambda line: None) -> str:
    """Run one seed. Returns the hash of its trace; ``say`` hears each line of it. Raises SeedFailed."""
    trace = hashlib.sha256()
    last = ["nothing"]

    def tell(line: str) -> None:
        last[0] = line
        trace.update(line.encode() + b"\n")
        say(line)

    with _silence(), tempfile.TemporaryDirectory(prefix="radixkv-sim-") as folder:
        try:
            Simulation(seed, Path(folder), tell).run(steps)
        except Exception as error:
            kind = type(error).__name__
            raise SeedFailed(
                f"seed {seed}, after {last[0]!r}: {kind}: {error}\nreplay: python -m tests.sim {seed}"
            ) from error
    return trace.hexdigest()


@contextmanager
def _silence() -> Iterator[None]:
    """Trouble in tiers is logged by the hundred here: it is what a simulation is made of."""
    logger = logging.getLogger("radixkv")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


class Simulation:
    """The steps of one seed."""

    def __init__(self, seed: int, folder: Path, tell: Callable[[str], None]) -> None:
        self.chance = random.Random(seed)
        self.tell = tell
        setup = draw_setup(self.chance)
        tell(f"seed {seed}: {setup}")
        self.world = World(folder, setup, self.chance)
        self.requests = Requests(self.world, self.chance)
        self.verbs = self._weights(VERBS | RARE)
        self.sequences = self._weights(SEQUENCES)
        self.step = 0

    def _weights(self, usual: dict[Verb, float] | dict[Sequence, float]) -> list[float]:
        """Every seed likes some steps better than others, and leaves a few out."""
        return [weight * self.chance.choice([0.0, 0.5, 1.0, 1.0, 2.0, 4.0]) + 0.01 for weight in usual.values()]

    def run(self, steps: int) -> None:
        """All steps, then an end in good order: nothing is held, and everything still reads right."""
        try:
            for self.step in range(steps):
                if self.chance.random() < DIRECTED:
                    self._sequence()
                else:
                    self._verb()
            self._end()
        finally:
            if self.world.tier is not None:
                self.world.tier.close()

    def _verb(self) -> None:
        (verb,) = self.chance.choices([*VERBS, *RARE], self.verbs)
        self._audit(f"{verb.__name__} {verb(self.requests)}")

    def _sequence(self) -> None:
        (sequence,) = self.chance.choices(list(SEQUENCES), self.sequences)
        for said in sequence(self.requests):
            self._audit(f"{sequence.__name__}: {said}")
            if self.chance.random() < 0.15:
                self._verb()

    def _audit(self, said: str) -> None:
        stats = self.world.stats
        gauges = [getattr(stats, field.name) for field in fields(stats) if not field.name.endswith("_s")]
        self.tell(f"{self.step:4} {self.world.clock.now:9.4f} {said} {gauges}")
        self.world.check()

    def _end(self) -> None:
        """Nothing fails any more: every lease gets what it waits for, all is given back, all prompts are read again."""
        world, requests = self.world, self.requests
        world.heal()
        for session in list(world.sessions):
            if self.chance.random() < 0.5:
                assert requests.wait(session) or session.lease.failed, "a lease hangs though every copy ends"
                requests.fill(session)
        self._audit("waited")
        world.idle()
        self._audit("idle")
        for round_, restarts in enumerate((False, True)):
            for ns in SPACES:
                for tokens in requests.prompts:
                    request = requests.open(tokens, ns, fill=False)
                    if request is None:
                        continue
                    assert requests.wait(request), "a lease hangs though every copy ends"
                    requests.fill(request)
                    requests.close(request)
            self._audit(f"all prompts, round {round_}")
            if restarts:
                world.restart()
                self._audit("another process")
        world.idle()
        world.close()
