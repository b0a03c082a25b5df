"""From messages to prompt tokens, so that every prompt begins with the whole prompt and answer before it.

A chat template is asked only for what stands between one answer and the next; that text is tokenised by itself and
appended to the token ids so far. So the prefix property holds exactly for any tokenizer, also for templates that would
rewrite the past.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.cli.conversations import Message, Thread


class ChatTemplate:
    """A transformers tokenizer's chat template, with a plain one ("User: ...

    Assistant:") where it has none or refuses the messages.
    """

    def __init__(self, tokenizer: Any, end_tokens: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self.end_tokens = frozenset(end_tokens)

    def first(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a first prompt, up to where the answer begins."""
        text = self._render(messages)
        plain = text is None
        # a rendered template writes its own begin-of-text token
        return self._tokens(_plain(messages) if text is None else text, special=plain)

    def following(self, history: Sequence[Message], new: Sequence[Message]) -> list[int]:
        """Token ids between the answer to ``history`` and the answer to ``new``.

        Earlier answers in ``history`` may have any text.
        """
        mark = "(answer)"
        while any(mark in m.content for m in (*history, *new)):
            mark = f"({mark})"
        messages = (*history, Message("assistant", mark), *new)
        text = self._render(messages)
        if text is None:
            text = _plain(messages)
        return self._tokens(text[text.rindex(mark) + len(mark) :], special=False)

    def extend(self, prompt: Sequence[int], answer: Sequence[int], following: Sequence[int]) -> list[int]:
        """The next prompt. An end token that closes the answer is left to the template."""
        kept = list(answer)
        while kept and kept[-1] in self.end_tokens:
            kept.pop()
        return [*prompt, *kept, *following]

    def _tokens(self, text: str, special: bool) -> list[int]:
        return [int(token) for token in self._tokenizer(text, add_special_tokens=special)["input_ids"]]

    def _render(self, messages: Sequence[Message]) -> str | None:
        """The first of some equivalent message lists that the template takes and shows whole; None if there is none."""
        if not getattr(self._tokenizer, "chat_template", None):
            return None
        for variant in _variants(messages):
            chat = [{"role": m.role, "content": m.content} for m in variant]
            try:
                text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            except Exception:  # templates refuse roles and orders by raising whatever they like
                continue
            if isinstance(text, str) and all(m.content.strip() in text for m in variant):
                return text
        return None


def _variants(messages: Sequence[Message]) -> Iterable[list[Message]]:
    """As they are; tool output as user text; then runs of one role joined; then system text as user text, too."""
    yield list(messages)
    plain = [Message("user", f"Tool output:\n{m.content}") if m.role == "tool" else m for m in messages]
    yield plain
    yield _joined(plain)
    yield _joined([Message("user", m.content) if m.role == "system" else m for m in plain])


def _joined(messages: Sequence[Message]) -> list[Message]:
    out: list[Message] = []
    for message in messages:
        if out and out[-1].role == message.role:
            out[-1] = Message(message.role, f"{out[-1].content}\n\n{message.content}")
        else:
            out.append(message)
    return out


def _plain(messages: Sequence[Message]) -> str:
    """A template for models without one."""
    names = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool output"}
    return "".join(f"{names[m.role]}: {m.content}\n" for m in messages) + "Assistant:"


@dataclass(frozen=True, slots=True)
class Step:
    """One turn to run: the thread's index and the turn's (from 0).

    again: the thread's last prompt is asked a second time.
    """

    thread: int
    turn: int
    again: bool = False


def pieces(threads: Sequence[Thread], template: ChatTemplate) -> list[list[list[int]]]:
    """Per thread and turn the token ids its prompt adds to the previous prompt and answer.

    A branch's first turn adds none.
    """
    out: list[list[list[int]]] = []
    for thread in threads:
        history: list[Message] = []
        if thread.parent is not None:
            before = threads[thread.parent].turns[: thread.shared]
            history = [m for turn in before for m in (*turn, Message("assistant", "-"))][:-1]
        added: list[list[int]] = []
        for number, turn in enumerate(thread.turns):
            if number == 0 and thread.parent is not None:
                added.append([])
                continue
            added.append(template.following(history, turn) if history else template.first(turn))
            history += [*([Message("assistant", "-")] if history else []), *turn]
        out.append(added)
    return out


def prompt_bounds(
    threads: Sequence[Thread], added: Sequence[Sequence[Sequence[int]]], reply_tokens: int
) -> list[list[int]]:
    """Per thread and turn the most tokens its prompt can have, when every answer takes ``reply_tokens``."""
    out: list[list[int]] = []
    for thread, parts in zip(threads, added, strict=True):
        total = 0 if thread.parent is None else out[thread.parent][thread.shared - 1]
        bounds = []
        for number, part in enumerate(parts):
            total += len(part) + (reply_tokens if number else 0)
            bounds.append(total)
        out.append(bounds)
    return out


def schedule(threads: Sequence[Thread], seed: int = 5) -> tuple[list[Step], list[Step]]:
    """Turns in order of arrival, before and after the restart: mixed as a server would see them, the same for every
    run.

    Each thread keeps its last turn for after the restart, or asks its only one again there. A branch begins once its
    parent has gone on by two turns or has none left: it comes back to KV that others may have pushed out.
    """
    chance = random.Random(seed)
    last = [max(1, len(t.turns) - 1, *(b.shared for b in threads if b.parent == i)) for i, t in enumerate(threads)]
    done = [0] * len(threads)
    before: list[Step] = []

    def ready(i: int) -> bool:
        parent = threads[i].parent
        if done[i] == last[i]:
            return False
        return parent is None or done[parent] >= min(threads[i].shared + 2, last[parent])

    while open_threads := [i for i in range(len(threads)) if ready(i)]:
        thread = chance.choice(open_threads)
        before.append(Step(thread, done[thread]))
        done[thread] += 1
    after = [
        Step(i, n, False) if n < len(t.turns) else Step(i, n - 1, True)
        for i, (t, n) in enumerate(zip(threads, done, strict=True))
    ]
    return before, after
