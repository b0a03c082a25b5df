"""Reading conversations: every accepted shape, and one clear line for every bad one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.cli.conversations import Message, load, parse, shipped
from radixkv.errors import ConfigError

ASK = {"role": "user", "content": "one?"}
MORE = {"role": "user", "content": "two?"}
REPLY = {"role": "assistant", "content": "not used"}
TOOL = {"role": "tool", "content": "42", "tool_call_id": "x"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}


def turns(data: Any) -> list[list[tuple[str, ...]]]:
    return [[tuple(m.content for m in turn) for turn in t.turns] for t in parse(json.dumps(data), "f")]


def test_the_shipped_conversations_are_what_the_demo_promises() -> None:
    threads = shipped()
    main = [t for t in threads if t.parent is None]
    assert len(main) >= 4
    assert all(len(t.turns) >= 5 for t in main)
    systems = {t.turns[0][0] for t in main}
    assert len(systems) == 1 and systems.pop().role == "system"
    assert len([t for t in threads if t.parent is not None]) == 2
    tools = [m for t in main for turn in t.turns for m in turn if m.role == "tool"]
    assert max(len(m.content) for m in tools) > 1500


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([ASK, REPLY, MORE], [[("one?",), ("two?",)]]),
        ({"messages": [ASK, REPLY, MORE, REPLY]}, [[("one?",), ("two?",)]]),
        ([[ASK], {"messages": [MORE]}], [[("one?",)], [("two?",)]]),
        ([ASK, MORE], [[("one?",), ("two?",)]]),
        ([ASK, CALL, TOOL, TOOL, REPLY, MORE], [[("one?",), ("42", "42"), ("two?",)]]),
        ([ASK, TOOL, REPLY], [[("one?", "42")]]),
        ([REPLY, ASK, REPLY], [[("not used", "one?")]]),
        ([ASK, REPLY, REPLY, MORE], [[("one?",), ("two?",)]]),
        (
            {"system": "S", "conversations": [[ASK], [{"role": "system", "content": "T"}, ASK]]},
            [[("S", "one?")], [("T", "one?")]],
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], [[("ab",)]]),
    ],
)
def test_accepted_shapes(data: Any, expected: Any) -> None:
    assert turns(data) == expected


def test_a_branch_shares_its_parents_turns() -> None:
    data = {"name": "n", "messages": [ASK, REPLY, MORE], "branches": [{"turn": 2, "messages": [MORE]}, {"turn": 1}]}
    parent, first, second = parse(json.dumps(data), "f")
    assert (first.parent, first.shared, first.name) == (0, 2, "n/1")
    assert first.turns == ((), (Message("user", "two?"),))
    assert (second.parent, second.shared, second.turns) == (0, 1, ((),))
    assert parent.parent is None


def test_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps([ASK]) + "\n\n" + json.dumps({"messages": [MORE]}) + "\n", "utf-8")
    assert [len(t.turns) for t in load(file)] == [1, 1]
    file.write_text("\ufeff" + json.dumps(ASK) + "\n" + json.dumps(REPLY) + "\n" + json.dumps(MORE), "utf-8")
    assert [len(t.turns) for t in load(file)] == [2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f: not JSON"),
        ("{", "f: not JSON"),
        ("[[]]\n{", "f: line 2 is not JSON"),
        ("3", "f: must be a list of messages or of conversations, not a number"),
        ("[]", "f: holds no conversation"),
        ("[[]]", "f: conversation 1: has no user message"),
        ("[3]", "f: conversation 1: messages must be a list, not a number"),
        ('{"messages": 3}', "f: conversation 1: messages must be a list, not a number"),
        ("{}", 'f: conversation 1: has no "messages"'),
        ('{"conversations": 3}', 'f: "conversations" must be a list'),
        ('{"system": 3, "conversations": []}', 'f: "system" must be text, not a number'),
        ('[[{"role": "user", "content": "a"}, 7]]', "f: conversation 1, message 2: must be an object, not a number"),
        ('[{"role": "robot", "content": "a"}]', "f: conversation 1, message 1: role 'robot' is not one of"),
        ('[{"role": ["user"], "content": "a"}]', "f: conversation 1, message 1: role"),
        ('[{"role": "user", "content": 5}]', "f: conversation 1, message 1: content must be text, not a number"),
        ('[{"role": "user", "content": null}]', "f: conversation 1, message 1: content must be text, not null"),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', "message 1: content must be text, not a list"),
        ('[{"role": "user", "content": "\\ud800"}]', "message 1: content has a lone surrogate at character 0"),
        ('[{"role": "system", "content": "a"}]', "f: conversation 1: has no user message"),
        ('{"messages": [{"role": "user", "content": "a"}], "name": 3}', '"name" must be text'),
        ('{"messages": [{"role": "user", "content": "a"}], "branches": 3}', '"branches" must be a list'),
        (
            '{"messages": [{"role": "user", "content": "a"}], "branches": [{"turn": 2}]}',
            'branch 1: "turn" must be a number from 1 to 1, not 2',
        ),
        ('{"messages": [{"role": "user", "content": "a"}], "branches": [7]}', 'branch 1: "turn" must be'),
        ("[" * 100000, "f: nested too deeply"),
    ],
)
def test_a_bad_file_gets_one_line_that_names_the_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read conversations .*: No such file"):
        load(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "latin").write_bytes(b'[{"role": "user", "content": "caf\xe9"}]')
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load(tmp_path / "latin")
