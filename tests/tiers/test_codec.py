"""Records round-trip bit for bit, whatever the payload; zstd contexts stay with their thread."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.errors import InvariantError
from radixkv.tiers import codec
from radixkv.tiers.record import HEADER_BYTES, Record, cut, pack_record, read_header, unpack_record
from radixkv.tiers.space import SEGMENT_BYTES, segment_count
from tests.tiers.chunks import noise, planar

KEY, ROOT = b"k" * 32, b"r" * 32


def segments(record: Record) -> list[memoryview]:
    """A record as it lies in the store."""
    return [memoryview(bytes(segment)) for segment in cut(record)]


def round_trip(payload: bytes, item_bytes: int) -> bytes:
    """The payload after a record was made of it and read back."""
    record = pack_record(KEY, ROOT, 3, item_bytes, memoryview(payload))
    stored = segments(record)
    assert len(stored) == segment_count(record.nbytes)
    assert {len(segment) for segment in stored} == {SEGMENT_BYTES}
    assert b"".join(stored)[: record.nbytes] == b"".join(record.parts)
    assert record.nbytes <= HEADER_BYTES + len(payload), "a record is never larger than its payload and a header"
    into = memoryview(bytearray(len(payload)))
    unpack_record(read_header(stored[0], KEY, len(payload)), stored, into)
    return bytes(into)


@settings(max_examples=150, deadline=None)
@given(payload=st.binary(max_size=3000), repeat=st.integers(1, 60), item_bytes=st.sampled_from([1, 2, 4]))
def test_any_payload_round_trips(payload: bytes, repeat: int, item_bytes: int) -> None:
    assert round_trip(payload * repeat, item_bytes) == payload * repeat


EDGES = [0, 1, 2, SEGMENT_BYTES - HEADER_BYTES - 1, SEGMENT_BYTES - HEADER_BYTES, SEGMENT_BYTES, 2 * SEGMENT_BYTES]


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
@pytest.mark.parametrize("nbytes", [*EDGES, *(edge + 1 for edge in EDGES)])
def test_sizes_around_the_segment_border(nbytes: int, item_bytes: int) -> None:
    for payload in (planar(KEY, nbytes), noise(KEY, nbytes)):
        assert round_trip(bytes(payload), item_bytes) == payload


def planes(values: np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]) -> bytes:
    """Byte planes, most significant first."""
    return values.astype(values.dtype.newbyteorder(">")).view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def test_a29_special_values_keep_their_bits() -> None:
    half = [0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00, 0x7E01, 0xFE55, 0xFFFF, 0x0000, 0x3C00]
    single = [0x80000000, 0x00000001, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFC12345, 0xFFFFFFFF]
    for item_bytes, values in ((2, np.array(half * 900, np.uint16)), (4, np.array(single * 900, np.uint32))):
        payload = planes(values)
        restored = round_trip(payload, item_bytes)
        assert restored == payload
        back = np.frombuffer(restored, np.uint8).reshape(item_bytes, -1).T.copy().view(f">u{item_bytes}")
        assert back.ravel().tolist() == values.tolist()


def test_what_does_not_pay_is_stored_raw() -> None:
    for item_bytes in (1, 2, 4):
        assert codec.encode(noise(KEY, 1 << 16), item_bytes).codec == codec.RAW
    encoded = codec.encode(planar(KEY, 1 << 16), 2)
    assert encoded.codec == codec.ZSTD_HEAD
    assert encoded.head_raw == 1 << 15 and encoded.head_stored < 1 << 14
    zeros = codec.encode(memoryview(bytes(1 << 16)), 1)
    assert (zeros.head_raw, zeros.parts[1:]) == (1 << 16, (b"",))


def test_a_large_head_is_tried_unless_a_sample_of_it_is_noise() -> None:
    size = 2 << 20
    assert codec.encode(noise(KEY, size), 2).codec == codec.RAW
    assert codec.encode(planar(KEY, size), 2).codec == codec.ZSTD_HEAD
    half = bytearray(noise(KEY, size))
    half[: size // 4] = bytes(size // 4)  # of the head, only the first half gets smaller
    encoded = codec.encode(memoryview(half), 2)
    assert encoded.codec == codec.ZSTD_HEAD
    assert encoded.head_stored < encoded.head_raw * 0.6
    assert round_trip(bytes(half), 2) == half


def test_the_raw_plane_is_not_copied() -> None:
    payload = bytearray(planar(KEY, 1 << 16))
    tail = codec.encode(memoryview(payload), 2).parts[1]
    payload[-1] ^= 0xFF
    assert tail[-1] == payload[-1]


def test_e7_threads_do_not_share_contexts() -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        for step in range(60):
            payload = bytes(planar(bytes([seed, step]) * 16, 4096))
            if round_trip(payload, 2) != payload:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_e7_a_context_of_another_thread_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec._contexts, "owner", threading.get_ident() + 1)
    with pytest.raises(InvariantError, match="zstd contexts"):
        codec.encode(planar(KEY, 4096), 2)
