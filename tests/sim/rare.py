"""Rarer verbs: media without a request, clearing by age and key, leases nobody closes, figures, parts that raise."""

from __future__ import annotations

from weakref import ref

import numpy as np

from radixkv.errors import OutOfPages
from radixkv.plan import DeletePlan, LoadPlan, NamePlan, ReadPlan, TouchPlan
from tests.sim.requests import Requests


def look_with_media(sim: Requests) -> str:
    """What a lookup says, a lease that follows at once is given, where nothing has to be loaded."""
    world, tokens, ns = sim.world, sim.prompt(), sim.space()
    media = sim.media(tokens)
    before = world.core.tree.now
    found = world.look(tokens, ns, media)
    assert world.cache.try_lookup(ns, tokens) == world.cache.lookup(ns, tokens)
    assert world.core.tree.now == before, "a lookup is no use"
    unknown = min((span.start for span in media if span.digest is None), default=len(tokens))
    assert found[2] <= unknown, "what stands behind unknown media is matched"
    return f"{len(tokens)} tokens, media {[span.digest for span in media]}: {found}"


def move_with_media(sim: Requests) -> str:
    """Demote, promote or prefetch of a prompt with media."""
    cache, tokens, ns = sim.world.cache, sim.prompt(), sim.space()
    media, kind = sim.media(tokens), sim.chance.choice(["host", "disk", "promote", "prefetch"])
    if kind == "prefetch":
        sim.world.jobs.append(cache.prefetch(ns, tokens, media=media))
    elif kind == "promote":
        try:
            return f"promote {cache.promote(ns, tokens, media)}"
        except OutOfPages:
            return "out of pages"
    else:
        return f"to {kind}: {cache.demote(ns, tokens, kind, media)}"
    return kind


def clear_some(sim: Requests) -> str:
    """By age, or by root key: what was used since stays as it was."""
    world, cache = sim.world, sim.world.cache
    tier = sim.chance.choice([None, "device", "host", "disk"])
    if sim.chance.random() < 0.3:
        entries = cache.namespaces()
        key = sim.chance.choice(entries).key if entries else b"?" * 32
        return f"key {tier}: {cache.clear(key, tier)}"
    since = max(0, cache.now - sim.chance.choice([0, 1, 3, 10, 30]))
    tokens, ns = sim.prompt(), sim.space()
    session = sim.open(tokens, ns, fill=False)  # used now
    before = world.look(tokens, ns)[0]
    if since < cache.now:
        done = cache.clear(sim.chance.choice([None, ns]), tier, unused_since=since)
        # a load that has ended by now makes it more
        assert session is None or world.look(tokens, ns)[0] >= before, "what was used just now is cleared"
    else:
        done = cache.clear(ns, tier, unused_since=since)
    if session is not None:
        sim.close(session)
    return f"{tier} unused since {since}: {done}"


def drop(sim: Requests) -> str:
    """Nobody closes a lease, or asks a job: both are given back."""
    world, session = sim.world, sim.session()
    if world.jobs:
        del world.jobs[0]
    if session is None or any(other is not session and other.stream is session.stream for other in world.sessions):
        return "nobody"
    session.stream.synchronize()
    world.sessions.remove(session)
    before, leases = world.stats.dropped_leases, world.stats.open_leases
    said, held = repr(session.lease), ref(session.lease)
    del session
    if not world.cache._plane.dropped:  # a directed sequence goes on with it
        lease = held()
        assert lease is not None, "a dropped lease is forgotten"
        lease.close()
        return "held"
    world.cache.tick()
    assert world.stats.dropped_leases == before + 1 and world.stats.open_leases <= leases - 1, "a dropped lease stays"
    return said


def figures(sim: Requests) -> str:
    """Figures by namespace sum up to those of the cache."""
    cache, stats = sim.world.cache, sim.world.stats
    entries = cache.namespaces()
    retired = bool(sim.world.core.tree.retired)
    for name, of_all in (
        ("cached_tokens", stats.cached_tokens), ("unfilled_slots", stats.unfilled_slots),
        ("pages", stats.cached_pages), ("host_chunks", stats.host_chunks), ("disk_chunks", stats.disk_chunks),
        ("pinned_tokens", stats.pinned_tokens), ("open_leases", stats.open_leases),
    ):  # fmt: skip
        total = sum(getattr(entry, name) for entry in entries)
        assert total <= of_all if retired else total == of_all, f"{name}: {total} of {of_all}"
    unique = sum(entry.unique_tokens for entry in entries)
    assert unique <= cache.unique_tokens() if retired else unique == cache.unique_tokens()
    assert 0 <= stats.hit_tokens <= stats.queried_tokens and stats.resumed_hit_tokens <= stats.resumed_tokens
    stored = cache._plane.residency.stored
    keys = set(stored.deleting)
    undeleted = cache.undeleted(keys)  # some have ended by now
    assert undeleted.deleting == len(keys & stored.deleting.keys())
    assert undeleted.failed == len(keys & stored.strays.keys())
    return f"{len(entries)} namespaces, {unique} tokens"


def trip(sim: Requests) -> str:
    """Movers raise at a share of what they are handed, or refuse kinds that they seldom do; mostly none of it any more,
    else there is little left for copies to go wrong in.
    """
    kinds: list[set[type]] = [*[set()] * 8, {LoadPlan}, {ReadPlan}, {DeletePlan}, {NamePlan, TouchPlan}]
    sim.world.mover.refuse = refused = set(sim.chance.choice(kinds))
    sim.world.mover.pace.trip = share = sim.chance.choice([0.0, 0.0, 0.0, 0.0, 0.2])
    return f"{share} {' '.join(sorted(kind.__name__ for kind in refused))}"


def break_copies(sim: Requests) -> str:
    """The device copies no page for a while: an append that would raises, and changes nothing."""
    session = sim.session()
    if session is None or not session.lease.ready:
        return "nobody"
    lease, device = session.lease, sim.world.device
    length, table, device.copies = lease.length, np.array(lease.block_table), False
    try:
        slots = lease.append(1, stream=session.stream)
    except (OSError, OutOfPages) as error:
        assert lease.length == length and not sim.world.cache._plane.broken
        assert np.array_equal(lease.block_table, table)
        return type(error).__name__
    finally:
        device.copies = True
    assert len(slots) == 1
    lease.truncate(length)
    session.read()
    return "in place"


RARE = {
    look_with_media: 3,
    move_with_media: 3,
    clear_some: 0.6,
    drop: 1,
    figures: 1,
    trip: 0.7,
    break_copies: 1,
}
"""As ``verbs.VERBS``."""
