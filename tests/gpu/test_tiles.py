"""Which decode kernel a batch gets."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from radixkv.gpu.decode import decode_tiles


@pytest.mark.parametrize(
    ("sequences", "programs"), [(1, 1), (32, 1), (48, 1), (64, 1), (96, 1), (128, 4), (160, 1), (256, 4)]
)
def test_four_programs_share_a_multiprocessor_in_several_full_rounds(sequences: int, programs: int) -> None:
    assert decode_tiles(128, 2, 8 * sequences, multiprocessors=132).per_sm == programs
