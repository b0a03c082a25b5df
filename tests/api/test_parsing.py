"""Bodies of lookups are decoded in one pass where that gives what the strict parser gives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.api.bodies import parse, parse_lookup
from radixkv.api.problems import ProblemError
from radixkv.keys import MAX_TOKEN
from radixkv.rest import LookupRequest
from radixkv.types import Tokens
from tests.api.running import body_of, packed

PIECES = rb""""model" "m" "salt" "revision" "" "AAAA" "tokens" "namespace" "prompts" { } [ ] , : 1 -0 1.0 1e2 01
2147483648 null true NaN \u0041 \ud800 \"""".split()
SPACES = ["", " ", "\n", "  \n "]
MEMBERS = b""""salt":"a", "salt":"", "model":"n", "revision":"", "tokens":[2], "tokens":"",""".split()
PIECES += [b" ", b"\t", b"\x00", "é".encode(), b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf"]


@given(
    st.sampled_from([body_of([1]), body_of([1, 2], packed([3])), body_of([1], salt="s", revision="é")]),
    st.lists(
        st.tuples(st.integers(0, 31), st.sampled_from([0, 0, 1]), st.sampled_from(PIECES) | st.sampled_from(MEMBERS)),
        max_size=3,
    ),
)
@settings(max_examples=1500, deadline=None)
def test_one_pass_decodes_what_the_strict_parser_does(body: bytes, edits: list[tuple[int, int, bytes]]) -> None:
    """It may leave a body to ``parse``, never take one that ``parse`` refuses or reads differently."""
    for where, gone, piece in edits:
        ends = [i + 1 for i, byte in enumerate(body) if byte in b'{[:,"']  # where an insertion may well be JSON
        at = ends[where % len(ends)] if ends else 0
        body = body[:at] + piece + body[at + gone :]
    quick = parse_lookup(body)
    if quick is not None:
        asked = parse(body, LookupRequest).prompts
        assert [(name, plain(tokens)) for name, tokens in quick] == [(p.namespace, p.tokens) for p in asked]


def plain(tokens: Tokens | str) -> list[int] | str:
    return tokens if isinstance(tokens, str) else tokens.tolist()


@given(st.lists(st.integers(0, MAX_TOKEN) | st.sampled_from([0, MAX_TOKEN]), max_size=20), st.sampled_from(SPACES))
@settings(deadline=None)
def test_one_pass_reads_every_list_of_tokens(tokens: list[int], space: str) -> None:
    text = "[" + space + f"{space},{space}".join(map(str, tokens)) + space + "]"
    quick = parse_lookup(body_of("x").replace(b'"x"', text.encode()))
    assert quick is not None
    assert plain(quick[0][1]) == tokens


NO_LISTS = rb"""[-0] [-1] [1.0] [1e2] [1E2] [true] [null] [[1]] [[]] [{}] {} 1 null true ["1"] [01] [1,] [,1] [1,,2] [
[1]] [+1] [0x1] [1_0] [2147483648] [1,4294967297] [\u0661]""".split()
NO_LISTS += [b"[1 2]", b"[1\v]", b"[1\xa0]", b"[\xd9\xa1]"]
NO_LISTS += [b"[1%s]" % (b"0" * digits) for digits in (10, 18, 19, 20, 40, 5000)]


@pytest.mark.parametrize("text", NO_LISTS)
def test_one_pass_leaves_what_is_no_list_of_tokens(text: bytes) -> None:
    """Whether ``parse`` takes it (a minus zero) or not."""
    assert parse_lookup(body_of("x").replace(b'"x"', text)) is None


@pytest.mark.parametrize("twice", [b'"model": "a", ', b'"salt": "", ', b'"salt": "", "salt": "", '])
def test_a_key_that_stands_twice_is_left_to_the_strict_parser(twice: bytes) -> None:
    body = body_of([1], salt="b").replace(b'"model"', twice + b'"model"', 1)
    assert parse_lookup(body) is None
    with pytest.raises(ProblemError, match="twice"):
        parse(body, LookupRequest)
