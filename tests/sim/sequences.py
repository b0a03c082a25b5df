"""Directed sequences: what random steps line up too seldom. Between their parts the simulation audits everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.sim.requests import Requests
from tests.sim.stored import cold_reads, durable, failed_copies, lost_copy, new_weights, pictures

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
    failed_copies: 2,
    lost_copy: 2,
    new_weights: 1,
    pictures: 3,
}
"""How often each is drawn, in proportion."""
