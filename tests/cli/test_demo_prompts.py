"""Prompts by concatenation: exact prefixes under any template, bounds known ahead; and the order of turns."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from radixkv.cli.conversations import Message, Thread, parse, shipped
from radixkv.cli.prompts import ChatTemplate, pieces, prompt_bounds, schedule
from tests.cli.demo_model import STRICT_TEMPLATE, TEMPLATE, tokenizer

TALK = {
    "name": "n",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "42"},
        {"role": "user", "content": "two"},
        {"role": "user", "content": "three"},
    ],
    "branches": [{"turn": 2, "messages": [{"role": "user", "content": "other"}]}],
}


def threads() -> list[Thread]:
    return parse(json.dumps(TALK), "f")


def test_concatenated_prompts_are_what_the_template_renders() -> None:
    words = tokenizer()
    template = ChatTemplate(words, [words.eos_token_id])
    main, branch = pieces(threads(), template)
    answer = words("yes")["input_ids"]
    prompt = main[0]
    for part in main[1:]:
        prompt = template.extend(prompt, [*answer, words.eos_token_id], part)
    chat = [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "yes"),
        ("tool", "42"),
        ("assistant", "yes"),
        ("user", "two"),
        ("assistant", "yes"),
        ("user", "three"),
    ]
    rendered = words.apply_chat_template(
        [{"role": r, "content": c} for r, c in chat], tokenize=False, add_generation_prompt=True
    )
    assert words.decode(prompt) == rendered
    assert branch[0] == []
    assert words.decode(branch[1]) == "<|end|><|user|>other<|end|><|assistant|>"


@pytest.mark.parametrize("template", [TEMPLATE, STRICT_TEMPLATE, None])
def test_every_template_shows_every_message(template: str | None) -> None:
    words = tokenizer(template)
    parts, _ = pieces(threads(), ChatTemplate(words, [words.eos_token_id]))
    texts = [words.decode(part) for part in parts]
    for text, contents in zip(texts, [("be brief", "one"), ("42",), ("two",), ("three",)], strict=True):
        assert all(content in text for content in contents)
        assert text.endswith("<|assistant|>" if template else "Assistant:")


def test_a_message_that_looks_like_the_answers_mark() -> None:
    words = tokenizer()
    part = ChatTemplate(words).following([Message("user", "(answer)")], [Message("user", "((answer)) why?")])
    assert words.decode(part) == "<|end|><|user|>((answer)) why?<|end|><|assistant|>"


def test_bounds_hold_for_the_longest_answers() -> None:
    words = tokenizer()
    template = ChatTemplate(words)
    lines = threads()
    added = pieces(lines, template)
    bounds = prompt_bounds(lines, added, 5)
    prompts: list[list[int]] = [added[0][0]]
    for part in added[0][1:]:
        prompts.append(template.extend(prompts[-1], [1] * 5, part))
    assert bounds[0] == [len(p) for p in prompts]
    assert bounds[1] == [bounds[0][1], bounds[0][1] + 5 + len(added[1][1])]


def order(lines: list[Thread]) -> tuple[list[Any], list[Any]]:
    before, after = schedule(lines)
    return [(s.thread, s.turn) for s in before], [(s.thread, s.turn, s.again) for s in after]


def test_the_schedule_runs_every_turn_once_and_in_order() -> None:
    lines = shipped()
    before, after = order(lines)
    assert sorted([*before, *((i, n) for i, n, _ in after)]) == [
        (i, n) for i, t in enumerate(lines) for n in range(len(t.turns))
    ]
    assert not any(again for _, _, again in after)
    for i, thread in enumerate(lines):
        own = [at for at, step in enumerate(before) if step[0] == i]
        assert [before[at][1] for at in own] == list(range(len(own)))
        if thread.parent is not None:
            assert own[0] > before.index((thread.parent, thread.shared - 1))
    changes = sum(a[0] != b[0] for a, b in pairwise(before))
    assert changes > len(before) / 2
    assert order(lines) == (before, after)


def test_lone_turns_and_branches_from_the_last_turn_are_asked_again() -> None:
    lone = parse('[{"role": "user", "content": "a"}]', "f")
    assert order(lone) == ([(0, 0)], [(0, 0, True)])
    ask = {"role": "user", "content": "a"}
    late = parse(json.dumps({"messages": [ask, ask], "branches": [{"turn": 2, "messages": [ask]}]}), "f")
    assert order(late) == ([(0, 0), (0, 1), (1, 0)], [(0, 1, True), (1, 1, False)])
