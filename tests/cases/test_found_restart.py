"""Another chunk size on a store whose table of namespaces lost its names."""

from __future__ import annotations

from radixkv.keys import Namespace
from radixkv.node import DISK as DISK_TIER
from radixkv.plan import StorePlan, WritePlan
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, make_layout, prompt


def test_nothing_hangs_from_a_chunk_that_is_not_whole(drive: Drive) -> None:
    small, large = (make_layout(page=4, chunk=chunk, layers=1, kv_heads=1, head_dim=2) for chunk in (8, 16))
    spaces = [Namespace(f"m{i}" * 1500) for i in range(6)]  # the table of names takes two of them
    d = drive(layout=small, disk_bytes=2 << 20)
    for ns in spaces:
        d.run(prompt(24), ns)
        d.drain()
    d.close()
    d = drive(layout=large, disk_bytes=2 << 20)
    d.namespaces.update(spaces)
    d.check()
    for root in d.core.tree.all_roots():
        for node in d.core.tree.nodes(root):
            for record in node.shorts or ():
                assert record.parent is None and record.tiers[DISK_TIER].children == 0
    for ns in spaces:
        assert d.look(prompt(24), ns) == (0, 0, 0)
        assert d.run(prompt(24), ns) == 0
    d.drain()
    d.check()
    d.close()
    d = drive(layout=small, disk_bytes=2 << 20)
    d.namespaces.update(spaces)
    assert [d.look(prompt(24), ns)[2] for ns in spaces] == [24] * 6
    d.check()


def test_a_lost_parent_comes_back_while_its_child_is_about_to_be_written(drive: Drive) -> None:
    """The child's old row is a stray, and its record has a place on disk: the row is not placed a second time."""
    d = drive(layout=make_layout(page=4, chunk=16), host_chunks=1, disk_bytes=DISK)
    d.run(prompt(32))
    d.drain()
    d.flush()
    (_, first), _ = d.records(prompt(32))
    assert d.core.disk is not None
    d.core.disk.delete([first])
    d.restart()
    assert d.look(prompt(32)) == (0, 0, 0)
    session = d.lease(prompt(32))
    d.cache.tick()
    while not any(plan.staging for plan in d.copies(StorePlan)):
        d.finish(next(plan for plan in d.mover.plans if isinstance(plan, StorePlan)))
    (write,) = d.copies(WritePlan)
    d.finish(write)
    d.check()
    d.drain()
    session.close()
    d.only_disk()
    assert d.look(prompt(32)) == (0, 0, 32)
