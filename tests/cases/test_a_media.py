"""Class A, media: equal placeholders with other content never share KV, in any tier, and the same content does."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv import InvalidTokens, Namespace, Span
from tests.cases.conftest import Drive
from tests.harness.driver import DISK, NS, Driver, prompt

IMAGE = 9
"""The placeholder token."""


def picture(before: int = 40, count: int = 64, after: int = 24) -> list[int]:
    """A prompt with ``count`` placeholders after ``before`` tokens."""
    return [*prompt(before), *[IMAGE] * count, *prompt(after, 3)]


def place(d: Driver, tokens: list[int], media: list[Span], tier: str) -> None:
    """Leave a prompt in one tier alone."""
    d.run(tokens, media=media)
    d.drain()
    if tier == "host":
        d.evict_all()
    elif tier in ("disk", "restart"):
        d.only_disk()
    if tier == "restart":
        d.restart()


TIERS = ("device", "host", "disk", "restart")


@pytest.mark.parametrize("tier", TIERS)
def test_a9_media_content_is_part_of_the_key(drive: Drive, tier: str) -> None:
    """Three requests of the same 129 tokens, with media h1, h2, h1: 0, 40 and 128 of them are hits."""
    d = drive(disk_bytes=DISK)
    tokens = [*picture(), 1]
    h1, h2 = [Span(40, 64, "h1")], [Span(40, 64, b"h2")]
    if tier == "restart":  # the numbers of this process are others than those of the next
        d.run(picture(5, 7, 5), media=[Span(5, 7, "h0")])
    place(d, tokens[:-1], h1, tier)
    assert d.look(tokens, media=h2)[2] == 40, "up to the first placeholder, token-exact"
    assert d.look(tokens)[2] == 40, "placeholders alone are no content"
    assert d.look(tokens, media=h1)[2] == 128
    assert d.look(tokens, Namespace("model", salt="s"), h1) == (0, 0, 0)
    assert d.run(tokens, media=h2) == 40
    d.check()
    assert d.run(tokens, media=h1) == 128
    d.check()
    assert d.run(tokens, media=h2) == 128, "129 tokens are cached: all but the last are taken"
    assert d.look([*tokens, 2], media=h2)[0] == d.look([*tokens, 2], media=h1)[0] == 129
    d.check()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("start", [0, 40, 64, 128, 150])
def test_a9_a_span_without_digest_ends_match_and_store(drive: Drive, tier: str, start: int) -> None:
    """Nothing from the span on is found or stored, in no tier, and its own request still reads right."""
    d = drive(disk_bytes=DISK)
    tokens = [*prompt(start), *[IMAGE] * 64, *prompt(40, 3)]
    unknown = [Span(start, 64, None)]
    session = d.lease(tokens, media=unknown)
    session.decode(prompt(30, 4))
    session.close()
    d.check()
    assert d.look([*tokens, 1], media=unknown)[0] == d.look([*tokens, 1])[0] == start
    if tier != "device":
        d.drain()
        (d.evict_all if tier == "host" else d.only_disk)()
    if tier == "restart":
        d.restart()
    assert d.look([*tokens, 1], media=unknown)[2] == d.look([*tokens, 1])[2] == start
    assert d.look([*tokens, 1], media=[Span(start, 64, "h")])[2] == start
    again = d.lease(tokens, media=unknown, fill=False).wait()
    assert again.lease.cached_tokens == start
    again.fill()
    d.check()
    assert d.cache.unique_tokens() == start, "the span's own tokens are in no tier"


def test_a9_twins_of_unknown_content_never_share(drive: Drive) -> None:
    d = drive()
    tokens, unknown = picture(), [Span(40, 64, None)]
    both = [d.lease(tokens, media=unknown) for _ in range(2)]
    for session in both:
        session.decode(prompt(40, 5))
    d.check()
    tables = [set(session.lease.block_table[3:].tolist()) for session in both]
    assert not tables[0] & tables[1]
    both[0].close()
    d.check()
    assert d.run(tokens, media=unknown) == 40


def test_adjacent_spans_stay_apart(drive: Drive) -> None:
    """One span of 32, twice a span of 16 of one digest, two of other digests: four contents of the same tokens."""
    d = drive(disk_bytes=DISK)
    tokens = [*prompt(16), *[IMAGE] * 32, *prompt(30, 3)]
    kinds = [
        [Span(16, 32, "a")],
        [Span(16, 16, "a"), Span(32, 16, "a")],
        [Span(16, 16, "a"), Span(32, 16, "b")],
        [Span(16, 16, "b"), Span(32, 16, "a")],
    ]
    assert [d.run(tokens, media=kind) for kind in kinds] == [0, 16, 32, 16]
    d.check()
    d.only_disk()
    d.restart()
    for kind in kinds:
        assert d.look(tokens, media=kind)[2] == 78
        assert d.run(tokens, media=kind) == 77
    d.check()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("start", "count"), [(60, 8), (63, 2), (48, 160), (0, 130), (64, 64), (70, 1)])
def test_a_span_across_chunk_borders(drive: Drive, tier: str, start: int, count: int) -> None:
    d = drive(disk_bytes=DISK)
    tokens = picture(start, count, 250 - start - count)
    mine = [Span(start, count, "mine")]
    place(d, tokens, mine, tier)
    assert d.look([*tokens, 1], media=mine)[2] == 250
    for other in ([Span(start, count, "other")], []):
        assert d.look([*tokens, 1], media=other)[2] == start
    if count > 1:
        shorter = [Span(start, count - 1, "mine")]
        assert d.look([*tokens, 1], media=shorter)[2] == start, "the same content over fewer placeholders"
    assert d.run([*tokens, 1], media=mine) == 250
    d.check()


def test_a_prompt_that_ends_inside_its_media(drive: Drive) -> None:
    """A cut prompt says that its span is shorter: that is another content."""
    d = drive()
    d.run(picture(40, 64, 0), media=[Span(40, 64, "h")])
    assert d.look(picture(40, 50, 0), media=[Span(40, 50, "h")])[0] == 40
    with pytest.raises(InvalidTokens):
        d.cache.lookup(NS, picture(40, 50, 0), [Span(40, 64, "h")])
    assert d.run(picture(40, 64, 0), media=[Span(40, 64, "h")]) == 103
    d.check()


def test_forks_of_a_request_with_media(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    tokens, media = picture(40, 20, 9), [Span(40, 20, "h")]
    parent = d.lease(tokens, media=media, commit=False)
    child = parent.fork()
    child.commit()
    parent.decode([1, 2, 3])
    child.decode([4, 5])
    d.check()
    for session in (parent, child):
        session.close()
    d.check()
    for end, want in (([1, 2, 3, 8], 72), ([4, 5, 8], 71), ([6], 69)):
        assert d.look([*tokens, *end], media=media)[0] == want
        assert d.look([*tokens, *end], media=[Span(40, 20, "g")])[0] == 40
    d.only_disk()
    d.restart()
    assert d.run([*tokens, 1, 2, 3, 8], media=media) == 72
    assert d.run([*tokens, 4, 5, 8], media=media) == 71
    d.check()


def test_commits_of_placeholders_in_parts(drive: Drive) -> None:
    """A commit takes the engine's own tokens, placeholders as they are, wherever it is cut; others are refused."""
    d = drive()
    tokens, media = picture(40, 64, 24), [Span(40, 64, "h")]
    session = d.lease(tokens, media=media, fill=False)
    session.compute()
    for count in (30, 15, 20, 39, 24):
        session.commit(count)
        d.check()
    assert session.lease.committed == 128
    session.close()
    assert d.look([*tokens, 1], media=media)[0] == 128
    wrong = d.lease(tokens, media=[Span(40, 64, "g")], fill=False)
    wrong.compute()
    bad = np.array(tokens[40:], np.int32)
    bad[30] = 5
    with pytest.raises(InvalidTokens):
        wrong.lease.commit(bad)
    assert wrong.lease.committed == 40
    wrong.commit()
    d.check()


def test_media_and_decoded_tokens_that_look_like_placeholders(drive: Drive) -> None:
    """What a model decodes is a token, also where it is the placeholder's number."""
    d = drive()
    tokens, media = picture(20, 12, 0), [Span(20, 12, "h")]
    session = d.lease(tokens, media=media)
    session.decode([IMAGE] * 16)
    session.close()
    assert d.look([*tokens, *[IMAGE] * 16, 1], media=media)[0] == 48
    assert d.look([*tokens, *[IMAGE] * 16, 1], media=[*media, Span(32, 16, "h")])[0] == 32
    d.check()


@pytest.mark.parametrize(
    "media",
    [
        [Span(40, 64, "h"), Span(100, 4, "g")],
        [Span(80, 4, "h"), Span(40, 4, "g")],
        [Span(120, 9, "h")],
        [Span(128, 1, None)],
    ],
    ids=["overlap", "order", "past_the_end", "no_digest_past_the_end"],
)
def test_bad_spans_change_nothing(drive: Drive, media: list[Span]) -> None:
    d = drive()
    before = d.stats
    for verb in (d.cache.lookup, d.cache.acquire):
        with pytest.raises(InvalidTokens):
            verb(NS, picture(), media)
    assert d.stats == before
    d.check()


@pytest.mark.parametrize(
    "values", [(-1, 1, "h"), (0, 0, "h"), (0, -1, "h"), (True, 1, "h"), (0, 1, ""), (0, 1, 5), (0, 1, "\ud800")]
)
def test_bad_values_of_a_span(values: tuple[int, int, str]) -> None:
    with pytest.raises(InvalidTokens):
        Span(*values)


def test_a9_prefetch_demote_and_promote_know_media(drive: Drive) -> None:
    d = drive(disk_bytes=DISK)
    tokens = [*picture(), 1]
    h1, h2 = [Span(40, 64, "h1")], [Span(40, 64, "h2")]
    d.run(tokens[:-1], media=h1)
    d.drain()
    d.cache.clear(tier="host")
    assert d.cache.demote(NS, tokens[:-1], media=h2) == 0, "another picture's chunks are not these"
    assert d.cache.demote(NS, tokens[:-1], "disk", h1) == 2
    d.only_disk()
    d.check()
    for media in (h2, ()):
        job = d.cache.prefetch(NS, tokens, media=media)
        assert job.wanted_tokens == 48 and not job.poll(), "up to the page the picture begins on"
        job.cancel()
        d.drain()
        d.cache.clear(tier="host")
    job = d.cache.prefetch(NS, tokens, media=h1)
    d.drain()
    assert job.poll() and (job.wanted_tokens, job.moved_tokens) == (128, 128)
    assert d.look(tokens, media=h1) == (0, 128, 128) and d.look(tokens, media=h2)[1] == 40
    assert d.cache.promote(NS, tokens, [Span(40, 64, None)]) == 40
    d.drain()
    assert d.look(tokens, media=h1)[0] == 32, "the part page went with the job that brought it"
    assert d.cache.promote(NS, tokens, h1) == 96
    d.drain()
    assert d.look(tokens, media=h1)[0] == 128
    d.check()
    for verb in (d.cache.prefetch, d.cache.promote, d.cache.demote):
        with pytest.raises(InvalidTokens, match="media span"):
            verb(NS, tokens, media=[Span(100, 64, "h")])
