"""Chains of more chunks than Python has stack frames."""

from __future__ import annotations

from tests.cases.conftest import Drive
from tests.harness.driver import Outcome, ReadPlan, make_layout, prompt

CHUNKS = 1100


def test_the_first_read_of_a_long_chain_fails_last(drive: Drive) -> None:
    layout = make_layout(page=2, chunk=4, layers=1, kv_heads=1, head_dim=2)
    d = drive(
        layout=layout, pages=2 * CHUNKS + 8, host_chunks=CHUNKS + 4, disk_bytes=256 << 20, queue_chunks=4 * CHUNKS
    )
    tokens = prompt(4 * CHUNKS)
    d.run(tokens)
    while d.mover.plans or d.cache.flush(0.0):
        d.mover.finish_all()
    d.evict_all()
    d.cache.clear(tier="host")
    session = d.lease([*tokens, 1], fill=False)
    reads = d.copies(ReadPlan)
    assert len(reads) == CHUNKS
    for plan in reversed(reads):
        d.mover.finish(d.mover.plans.index(plan), Outcome.ERROR if plan is reads[0] else None)
        if plan is reads[1]:
            d.cache.tick()
    d.cache.tick()
    assert session.lease.settled and session.lease.cached_tokens == 0
    d.cache.check()
    assert d.look(tokens)[2] == 4 * CHUNKS
    session.close()
    d.mover.finish_all()
    d.cache.close()
    d.closed = True
