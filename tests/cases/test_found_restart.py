"""Another chunk size on a store whose table of namespaces lost its names."""

from __future__ import annotations

from radixkv.keys import Namespace
from radixkv.node import DISK as DISK_TIER
from tests.cases.conftest import Drive
from tests.harness.driver import make_layout, prompt


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
