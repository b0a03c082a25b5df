"""The plain verbs: one call of the cache each, its arguments drawn from the seed. Each says what it did."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from radixkv.errors import OutOfPages
from radixkv.plan import LoadPlan, Outcome, StorePlan, WritePlan
from tests.sim.model import bounds, check_coldest, check_evicted, check_flushed, ends
from tests.sim.requests import Requests
from tests.sim.world import SPACES

Verb = Callable[[Requests], str]


def look(sim: Requests) -> str:
    tokens, ns = sim.prompt(), sim.space()
    limits = bounds(sim.world, ns, np.array(tokens, np.int32).tobytes())
    found = sim.world.look(tokens, ns)
    assert limits.device[0] <= found[0] <= limits.device[1], f"device {found} {limits}"
    assert limits.host[0] <= found[1] <= limits.host[1], f"host {found} {limits}"
    assert limits.all[0] <= found[2] <= limits.all[1], f"all {found} {limits}"
    assert found[2] <= sim.world.common(tokens, ns), "more than was ever committed"
    return f"{len(tokens)} tokens: {found}"


def acquire(sim: Requests) -> str:
    chance = sim.chance
    tokens, ns = sim.prompt(), sim.space()
    fill, commit = chance.random() < 0.8, chance.random() < 0.8
    reserve = chance.choice([0, 0, 0, sim.world.layout.chunk_tokens])
    media = sim.media(tokens)
    session = sim.open(tokens, ns, fill=fill, commit=commit, reserve=reserve, media=media)
    return f"{len(tokens)} tokens, media {[span.digest for span in media]}: {session and session.lease}"


def go_on(sim: Requests) -> str:
    """Wait for what is loaded, then compute the prompt's rest, and maybe more tokens."""
    session = sim.session()
    if session is None or not sim.wait(session):
        return "nobody" if session is None else "hangs"
    more = sim.some() if sim.chance.random() < 0.5 else []
    done = sim.fill(session, more, commit=sim.chance.random() < 0.7)
    return f"{len(more)} more: {done}, {session.lease}"


def commit_part(sim: Requests) -> str:
    session = sim.session()
    if session is None or not session.lease.ready:
        return "nobody"
    count = sim.chance.randint(0, session.lease.length - session.lease.committed)
    sim.commit(session, count)
    return f"{count} tokens: {session.lease}"


def poll(sim: Requests) -> str:
    session = sim.session()
    return "nobody" if session is None else str(session.lease.poll())


def observe_prefill(sim: Requests) -> str:
    """The engine says how fast it computes: ignored where the configuration says it."""
    tokens, seconds = sim.chance.randint(0, sim.longest), sim.chance.choice([0.0, 0.001, 0.03, 0.3])
    sim.world.cache.observe_prefill(tokens, seconds)
    return f"{tokens} tokens in {seconds} s"


def fork(sim: Requests) -> str:
    session = sim.session()
    if session is None or not session.lease.settled or len(sim.world.sessions) >= 8:
        return "nobody"
    return repr(session.fork().lease)


def close(sim: Requests) -> str:
    session = sim.session()
    if session is None:
        return "nobody"
    keep = sim.chance.choice([None, None, None, 0, sim.chance.randint(0, sim.longest)])
    before = repr(session.lease)
    sim.close(session, keep)
    return f"keep {keep}: {before}"


def evict(sim: Requests) -> str:
    pages = sim.chance.choice([1, 2, 5, sim.world.setup.pages])
    sim.world.cache._plane.drain()  # what else evict would apply first
    free, before = sim.world.stats.free_pages, ends(sim.world)
    freed = sim.world.cache.evict(pages)
    assert freed <= pages
    check_coldest(before)
    assert sim.world.stats.free_pages >= free + freed, "freed pages are free"
    if freed < pages:
        check_evicted(sim.world)
    return f"{pages}: {freed}"


def demote(sim: Requests) -> str:
    to = sim.chance.choice(["host", "disk"]) if sim.world.config.disk.capacity_bytes else "host"
    return f"to {to}: {sim.world.cache.demote(sim.space(), sim.prompt(), to=to)}"


def promote(sim: Requests) -> str:
    try:
        return str(sim.world.cache.promote(sim.space(), sim.prompt()))
    except OutOfPages:
        return "out of pages"


def prefetch(sim: Requests) -> str:
    """Start one, poll some, cancel some."""
    to = sim.chance.choice(["host", "host", "device"])
    try:
        sim.world.jobs.append(sim.world.cache.prefetch(sim.space(), sim.prompt(), to))
    except OutOfPages:
        return "out of pages"
    for job in list(sim.world.jobs):
        if sim.chance.random() < 0.3:
            job.cancel()
        if job.poll():
            assert job.moved_tokens <= job.wanted_tokens, "more moved than was to be"
            sim.world.jobs.remove(job)
    return f"to {to}: {len(sim.world.jobs)} under way"


def truncate(sim: Requests) -> str:
    """Speculative decoding: some tokens are appended, part of them is given up, others take their place."""
    session = sim.session()
    if session is None or not sim.fill(session, sim.some(), commit=False):
        return "nobody"
    keep = sim.truncate(session)
    more = sim.some() if sim.chance.random() < 0.7 else []
    done = sim.fill(session, more, commit=sim.chance.random() < 0.5)
    return f"to {keep}, {len(more)} more: {done}, {session.lease}"


def bump_revision(sim: Requests) -> str:
    """Other weights under the same names: what was cached is never read again."""
    ns = sim.chance.choice([None, *SPACES])
    sim.world.replace_weights(*(SPACES if ns is None else [ns]))
    return f"{ns and ns.salt!r}: {sim.world.cache.bump_revision(ns)}"


def clear(sim: Requests) -> str:
    ns = sim.chance.choice([None, *SPACES])
    tier = sim.chance.choice([None, "device", "host", "disk"])
    return f"{tier}: {sim.world.cache.clear(ns, tier)}"


def tick(sim: Requests) -> str:
    sim.world.cache.tick()
    stats = sim.world.stats
    return f"{stats.in_flight} in flight, {stats.free_pages} free"


def flush(sim: Requests) -> str:
    """A flush ends by its deadline, give or take one delay of the tier."""
    clock, wait_s = sim.world.clock, sim.chance.choice([0.0, 0.05, 1.0])
    start = clock.now
    left = sim.world.cache.flush(timeout_s=wait_s)
    assert clock.now - start < wait_s + 2.0, "flush overruns its deadline"
    if not left and sim.world.tier is not None and not sim.world.setup.second_use:
        check_flushed(sim.world)
    return f"{wait_s}: {left} left"


def time_passes(sim: Requests) -> str:
    seconds = sim.chance.choice([0.001, 0.01, 0.05, 0.5])
    sim.world.clock.run(seconds)
    return f"{seconds}"


def end_copy(sim: Requests) -> str:
    """One copy ends now, in whatever order; stores and writes at times in an error."""
    plans = sim.world.choices()
    if not plans:
        return "none"
    plan = sim.chance.choice(plans)
    fails = isinstance(plan, StorePlan | LoadPlan | WritePlan) and sim.chance.random() < sim.world.mover.pace.fail
    sim.world.finish(plan, Outcome.ERROR if fails else None, tell=sim.chance.random() < 0.5)
    return f"{type(plan).__name__} {plan.id}"


def refuse(sim: Requests) -> str:
    """The mover takes no more stores, or writes; or it takes all again."""
    choices: list[set[type]] = [set(), set(), {StorePlan}, {WritePlan}]
    sim.world.mover.refuse = refused = sim.chance.choice(choices)
    return " ".join(kind.__name__ for kind in refused) or "nothing"


def restart(sim: Requests) -> str:
    sim.world.restart()
    return f"{sim.world.stats.disk_chunks} chunks on disk"


def kill(sim: Requests) -> str:
    sim.world.kill()
    return f"{sim.world.stats.disk_chunks} chunks on disk"


VERBS: dict[Verb, float] = {
    acquire: 14,
    go_on: 10,
    commit_part: 4,
    poll: 2,
    observe_prefill: 1,
    fork: 3,
    close: 9,
    look: 6,
    evict: 5,
    demote: 2,
    promote: 3,
    prefetch: 3,
    truncate: 4,
    bump_revision: 0.3,
    clear: 0.5,
    tick: 6,
    flush: 1,
    time_passes: 6,
    end_copy: 8,
    refuse: 1,
    restart: 0.4,
    kill: 0.4,
}
"""How often each is drawn, in proportion; every seed changes these weights."""
