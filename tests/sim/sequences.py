"""Directed sequences: what random steps line up too seldom. Between their parts the simulation audits everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from radixkv.plan import LoadPlan, Outcome, ReadPlan
from tests.sim.requests import Requests

Sequence = Callable[[Requests], Iterator[str]]


def evict_regrow(sim: Requests) -> Iterator[str]:
    """A path is evicted, whole or in part, and grown again, the same or another way."""
    tokens, ns = sim.prompt(), sim.space()
    session = sim.open(tokens, ns)
    yield "grown"
    if session is not None:
        sim.close(session)
    yield "closed"
    sim.world.cache.evict(sim.chance.choice([1, 3, sim.world.setup.pages]))
    yield "evicted"
    cut = sim.chance.randint(0, len(tokens))
    sim.open(tokens[:cut] + (sim.some() if sim.chance.random() < 0.7 else tokens[cut:]), ns)
    yield "grown again"


def close_evict_commit(sim: Requests) -> Iterator[str]:
    """One lease closes, its pages go, another one with the same prefix commits."""
    tokens, ns = sim.prompt(), sim.space()
    first, second = (sim.open(tokens, ns, commit=False) for _ in range(2))
    yield "twins"
    if first is not None and sim.chance.random() < 0.7:
        sim.commit(first)
        yield "committed"
    if first is not None:
        sim.close(first)
    sim.world.cache.evict(sim.chance.choice([2, sim.world.setup.pages]))
    yield "evicted"
    if second is not None:
        sim.fill(second, sim.some())
    yield "the other committed"


def siblings(sim: Requests) -> Iterator[str]:
    """A fork and its origin write past the same half-filled page, or anew where they share uncommitted tokens."""
    session = sim.session() or sim.open(sim.prompt(), sim.space())
    if session is None or not sim.fill(session, sim.some() if sim.chance.random() < 0.5 else [], commit=False):
        return
    other = session.fork()
    pair = [session, other]
    sim.chance.shuffle(pair)
    yield "forked"
    for one in pair:
        if sim.lives(one) and one.lease.ready and sim.chance.random() < 0.5:
            sim.truncate(one)
            yield "one gave some up"
        sim.fill(one, sim.some(), commit=sim.chance.random() < 0.6)
        yield "one wrote"
    sim.close(pair[0], sim.chance.choice([None, None, 0, 3]))
    yield "one closed"
    sim.world.cache.evict(sim.chance.choice([0, 2, sim.world.setup.pages]))
    sim.fill(pair[1], sim.some())
    yield "the other went on"


def page_by_page(sim: Requests) -> Iterator[str]:
    """Decode token by token across page and chunk borders, one commit each, others reading along."""
    session = sim.open(sim.prompt(), sim.space())
    if session is None:
        return
    for _ in range(sim.chance.randint(2, 2 * sim.world.layout.chunk_tokens)):
        if not sim.fill(session, [sim.chance.randint(0, 2)]):
            return
        if sim.chance.random() < 0.3:
            yield "a token"
    reader = sim.open(session.tokens[: session.lease.committed], session.ns, commit=False)
    yield "read along"
    sim.close(session)
    if reader is not None:
        sim.fill(reader, sim.some())
    yield "the reader went on"


def store_race(sim: Requests) -> Iterator[str]:
    """Pages are evicted, and taken by another prompt, while they are stored."""
    tokens, ns = sim.prompt(), sim.space()
    session = sim.open(tokens, ns)
    if session is not None:
        sim.close(session)
    yield "closed"
    sim.world.cache.tick()
    sim.world.cache.evict(sim.world.setup.pages)
    yield "evicted"
    sim.open(sim.prompt(), sim.space())
    yield "another prompt"
    sim.world.clock.run(0.05)
    sim.world.cache.tick()
    yield "stored"
    sim.open(tokens, ns, fill=False)
    yield "asked for again"


def cold(sim: Requests) -> Iterator[str]:
    """As much as fits on disk, nothing above it."""
    world = sim.world
    for _ in range(2):
        world.clock.run(0.3)
        world.cache.tick()
        world.cache.flush(timeout_s=1.0)
    world.cache.evict(world.setup.pages)
    yield "flushed and evicted"
    world.cache.clear(tier="host")
    yield "host cleared"


def cold_reads(sim: Requests) -> Iterator[str]:
    """Prompts come back from disk, reads ending one by one in any order; leases close half way, or wait."""
    yield from cold(sim)
    tokens, ns = sim.chance.choice(sim.prompts), sim.space()
    sessions = [sim.open(t, ns, fill=False) for t in (tokens, sim.prompt(), tokens + sim.some())]
    yield "asked for"
    for _ in range(sim.chance.randint(0, 8)):
        plans = sim.world.choices()
        reads = [plan for plan in plans if isinstance(plan, ReadPlan | LoadPlan)]
        if reads:
            plan = sim.chance.choice(reads)
            bad = isinstance(plan, ReadPlan) and sim.chance.random() < 0.2 and bool(sim.world.setup.rates)
            ending = sim.chance.choice([Outcome.ERROR, Outcome.MISSING, Outcome.CORRUPT]) if bad else None
            sim.world.finish(plan, ending, tell=sim.chance.random() < 0.7)
            yield "a read ended"
    for session in sessions:
        if session is None:
            continue
        if sim.chance.random() < 0.3:
            sim.close(session)
        elif sim.wait(session):
            sim.fill(session)
        yield "waited or closed"


def come_back(sim: Requests) -> Iterator[str]:
    """A prompt is stored, leaves the device, comes back from the host into pages other requests just had."""
    tokens, ns = sim.prompt(), sim.space()
    session = sim.open(tokens, ns)
    if session is not None:
        sim.close(session)
    sim.world.clock.run(0.2)
    sim.world.cache.tick()
    sim.world.clock.run(0.2)
    sim.world.cache.tick()
    sim.world.cache.evict(sim.world.setup.pages)
    yield "in the host"
    back = sim.open(tokens + sim.some(), ns, fill=False)
    yield "loading"
    other = sim.open(sim.prompt(), sim.space())
    yield "another prompt"
    for session in (other, back):
        if session is not None and sim.wait(session):
            sim.fill(session)
            yield "went on"


def cut_regrow(sim: Requests) -> Iterator[str]:
    """What a lease wrote is taken back while it is stored, and computed anew before those copies end."""
    stem, ns = sim.prompt(), sim.space()
    tokens = stem + [sim.chance.randint(0, 2) for _ in range(2 * sim.world.layout.chunk_tokens)]
    session = sim.open(tokens, ns)
    sim.world.land_fences()
    sim.world.cache.tick()
    yield "being stored"
    if session is not None:
        sim.close(session, sim.chance.choice([0, len(stem)]))
    yield "cut"
    session = sim.open(tokens, ns)
    sim.world.land_fences()
    sim.world.cache.tick()
    yield "grown again"
    for _ in range(4):
        sim.world.mover.wait(0.1)
        sim.world.cache.tick()
        yield "a copy ended"
    if session is not None:
        sim.close(session)
    yield "closed"


def tug(sim: Requests) -> Iterator[str]:
    """Two prompts push each other out of a small host tier, loads and stores crossing."""
    pair = [(sim.prompt(), sim.space()) for _ in range(2)]
    for _ in range(3):
        for tokens, ns in pair:
            session = sim.open(tokens, ns, fill=False)
            yield "asked for"
            if session is not None:
                if sim.chance.random() < 0.7 and sim.wait(session):
                    sim.fill(session)
                sim.close(session)
            sim.world.cache.evict(sim.world.setup.pages)
            sim.world.clock.run(sim.chance.choice([0.0, 0.01, 0.1]))
            sim.world.cache.tick()
            yield "pushed out"


def new_weights(sim: Requests) -> Iterator[str]:
    """The weights of a namespace are replaced: no later process finds what was stored before, nor what came after."""
    world, ns = sim.world, sim.space()
    session = sim.open(sim.prompt(), ns)
    if session is not None:
        sim.close(session)
    world.clock.run(0.3)
    world.cache.tick()
    world.cache.flush(timeout_s=1.0)
    yield "the old ones' KV"
    world.replace_weights(ns)
    world.cache.bump_revision(ns)
    assert not any(world.look(tokens, ns)[2] for tokens in sim.prompts), "KV of the old weights"
    yield "new weights"
    session = sim.open(sim.prompt(), ns)
    yield "the new ones' KV"
    if session is not None:
        sim.close(session)
    for other in list(world.sessions):
        sim.close(other)
    world.clock.run(0.5)
    world.cache.tick()
    if not world.core.tree.generations or world.tier is None:
        return
    rates, world.tier.rates = world.tier.rates, {}
    flushed = not world.cache.flush(timeout_s=5.0) and not world.core.flights
    world.restart()
    world.tier.rates = rates
    if not flushed:
        return
    assert not any(world.look(tokens, ns)[2] for tokens in sim.prompts), "KV of a revision that is over"
    yield "another process"


def _trouble(sim: Requests) -> list[int]:
    """Why something that was on disk may be there no more."""
    stats = sim.world.stats
    return [stats.disk_evicted, stats.write_refused, stats.lost]


def durable(sim: Requests) -> Iterator[str]:
    """What a complete flush said is on disk is found by the next process, as far as before; what was stored after a
    new revision is found by no other process.
    """
    world = sim.world
    if world.core.tree.generations:
        return
    for session in list(world.sessions):
        sim.close(session)
    world.clock.run(0.5)
    world.cache.tick()
    yield "closed"
    ns = sim.space()
    before = [world.look(tokens, ns)[2] for tokens in sim.prompts]
    trouble = _trouble(sim)
    if world.cache.flush(timeout_s=5.0) or world.tier is None or world.tier.damaged() or _trouble(sim) != trouble:
        return
    if sim.chance.random() < 0.5:
        world.kill()
    else:
        world.restart()
    # with few branches looked at, which of them has the shared head of a chunk depends on their order
    unit = 1 if world.config.policy.partial_children == 8 else world.layout.chunk_tokens
    for tokens, covered in zip(sim.prompts, before, strict=True):
        covered = covered // unit * unit
        assert world.look(tokens, ns)[2] >= covered, f"{covered} tokens of {tokens} were on disk"
    yield "another process"


SEQUENCES: dict[Sequence, float] = {
    evict_regrow: 3,
    close_evict_commit: 3,
    siblings: 4,
    page_by_page: 2,
    store_race: 3,
    cold_reads: 2,
    come_back: 3,
    cut_regrow: 3,
    tug: 2,
    durable: 2,
    new_weights: 1,
}
"""How often each is drawn, in proportion."""
