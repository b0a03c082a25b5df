"""Directed sequences about what is stored: cold reads, restarts, new weights, media."""

from __future__ import annotations

from collections.abc import Iterator

from radixkv.media import Span
from radixkv.plan import LoadPlan, Outcome, ReadPlan, WritePlan
from tests.sim.model import check_flushed
from tests.sim.requests import Requests


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


def lost_copy(sim: Requests) -> Iterator[str]:
    """The host gives a conversation's end up before the disk has it: a flush stores it again from the device."""
    world = sim.world
    refused = WritePlan in world.mover.refuse
    world.mover.refuse.add(WritePlan)
    session = sim.open(sim.prompt() + sim.some(), sim.space())
    if session is not None:
        sim.close(session)
    world.land_fences()
    world.cache.tick()
    world.clock.run(0.3)
    world.cache.clear(tier="host")
    yield "the host's copy is gone"
    if not refused:
        world.mover.refuse.discard(WritePlan)
    if not world.cache.flush(timeout_s=5.0) and world.tier is not None and not world.setup.second_use:
        check_flushed(world)
    yield "flushed"


def failed_copies(sim: Requests) -> Iterator[str]:
    """Copies to the device fail for good, before and after those who asked for them have closed, or gone on beside
    them; then the same prompt is asked for again.
    """
    world, ns = sim.world, sim.space()
    tokens = sim.prompt() + sim.some()
    session = sim.open(tokens, ns)
    if session is not None:
        sim.close(session)
    world.land_fences()
    world.cache.tick()
    world.clock.run(0.3)
    world.cache.tick()
    world.cache.evict(world.setup.pages)
    yield "in the host"
    cut = sim.chance.randint(len(tokens) // 2, len(tokens))
    if sim.chance.random() < 0.5:  # the first page of a chunk alone is to come, and not all of it
        cut = cut // world.layout.chunk_tokens * world.layout.chunk_tokens + world.layout.page_tokens - 1
    askers = [sim.open(tokens[:cut] + sim.some() * (number % 2), ns, fill=False) for number in range(2)]
    for asker in askers:
        if asker is not None and sim.chance.random() < 0.6:
            sim.close(asker)
    yield "some have closed"
    for _ in range(world.config.policy.load_retries * world.setup.pages):
        loads = world.copies(LoadPlan)
        if not loads or sim.chance.random() < 0.02:
            break
        world.finish(sim.chance.choice(loads), Outcome.ERROR)
    yield "copies failed"
    session = sim.open(tokens, ns, fill=False)
    if session is not None and sim.wait(session):
        sim.fill(session)
    yield "asked for again"


def pictures(sim: Requests) -> Iterator[str]:
    """One text around two pictures: stored side by side, read back after a restart or an eviction."""
    world, ns = sim.world, sim.space()
    tokens = sim.prompt() + sim.some()
    spans = [(Span(0, 1, digest),) for digest in ("a", "b")]
    for media in spans:
        session = sim.open(tokens, ns, media=media)
        if session is not None:
            sim.close(session)
        yield "seen"
    world.land_fences()
    world.cache.tick()
    world.clock.run(0.3)
    world.cache.flush(timeout_s=1.0)
    world.cache.evict(world.setup.pages)
    world.cache.clear(tier="host")
    yield "stored"
    if sim.chance.random() < 0.5:
        world.restart()
    for media in sim.chance.sample(spans, 2):
        session = sim.open(tokens, ns, fill=False, media=media)
        if session is not None and sim.wait(session):
            sim.fill(session)
        yield "seen again"


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
    knows = world.cache
    knows.bump_revision(ns)
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
    if world.cache is not knows or world.tier is None:  # another process by now
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
    if world.bumped() or world.setup.second_use:
        return
    for session in list(world.sessions):
        sim.close(session)
    world.clock.run(0.5)
    world.cache.tick()
    yield "closed"
    ns = sim.space()
    before = [world.look(tokens, ns)[2] for tokens in sim.prompts]
    tree, trouble = world.core.tree, _trouble(sim)
    counts = [len(node.children or ()) for root in tree.all_roots() for node in tree.nodes(root)]
    all_looked_at = max(counts, default=0) <= world.config.policy.partial_children
    if world.cache.flush(timeout_s=5.0) or world.tier is None or world.tier.damaged() or _trouble(sim) != trouble:
        return
    if sim.chance.random() < 0.5:
        world.kill()
    else:
        world.restart()
    # with few branches looked at, which of them has the shared head of a chunk depends on their order
    unit = 1 if all_looked_at else world.layout.chunk_tokens
    for tokens, covered in zip(sim.prompts, before, strict=True):
        covered = covered // unit * unit
        assert world.look(tokens, ns)[2] >= covered, f"{covered} tokens of {tokens} were on disk"
    yield "another process"
