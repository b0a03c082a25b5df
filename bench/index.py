"""What the index costs: radixkv with leases and policy in place, beside a bare prototype, a memcmp floor and, where
they can be imported, other engines' indexes; all in one run.

``python -m bench index [--quick | --full] [--trace PATH] [--peers] [--json FILE] [--repeats N]``; docs/benchmarks.md
says how to read it.
"""

from __future__ import annotations

import argparse
import json
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from bench import peers, workloads
from bench.indexes import PAGE_TOKENS, CacheIndex, Index, Maker, PlainIndex
from bench.peers import SglangRust, VllmBlockPool
from bench.report import FLOOR, judge, rules, table
from bench.timing import Results, each, frozen, machine, quiet
from radixkv.lease import Lease
from radixkv.types import Tokens


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is run. sequences, asked: of W1, inserted and looked up. chats: of W2. prompts: of W3. leaves: of the
    trees evicted from; peer_leaves: the most that a peer is given. memory_chats: chats of the memory measurement
    (4,800 tokens each). steps: decode steps timed. requests: of W4's trace.
    """

    repeats: int = 5
    sequences: int = 2000
    asked: int = 200
    chats: int = 500
    prompts: int = 3
    leaves: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    peer_leaves: int = 10_000
    memory_chats: int = 210
    steps: int = 640
    requests: int = 3000


QUICK = Sizes(
    repeats=2, sequences=24, asked=12, chats=6, prompts=1, leaves=(200,), memory_chats=4, steps=48, requests=6
)
FULL_CHATS = 2084
"""10 million tokens."""
HISTORY = (1_024, workloads.LONG_TOKENS)
MISS, EVICT = "first-page miss, 9,216 tokens", "evict, 64 pages a call"
FULL_TRACE = 3000


def decode_tokens(lease: Lease, tokens: Sequence[Tokens]) -> None:
    """What an engine's steps ask of a lease, one token at a time."""
    for token in tokens:
        lease.append(1)
        lease.commit(token)


def replay(index: Index, work: workloads.Requests) -> tuple[float, int]:
    """Look up and insert each request; what would be over the capacity leaves first, least recently used first, but
    nothing of what the request itself matched. Nanoseconds per token, and tokens hit.
    """
    capacity = work.capacity_tokens // PAGE_TOKENS
    hits = cached = spent = tokens = 0
    for i in range(work.count):
        given, again = index.prepare(work.sequence(i)), index.prepare(work.sequence(i))
        began = perf_counter_ns()
        covered = index.lookup(given)
        spent += perf_counter_ns() - began
        size = len(work.sequence(i))
        hits, tokens, cached = hits + covered, tokens + size, cached + (size - covered) // PAGE_TOKENS
        over = max(0, cached - capacity)
        if isinstance(index, CacheIndex):
            request = index.request(again, again, over)  # its lookup stamps nothing: held first, evicted then
            spent += request.whole
            cached -= request.freed
            continue
        began = perf_counter_ns()
        if over and not isinstance(index, VllmBlockPool):  # that one evicts for itself
            cached -= index.evict(over)
        index.insert(again)
        spent += perf_counter_ns() - began
    return spent / tokens, hits


class Run:
    """One run over all indexes. Each measurement is repeated as a whole, the indexes taking turns in going first."""

    def __init__(self, sizes: Sizes, makers: Sequence[Maker]) -> None:
        self.sizes = sizes
        self.makers = makers
        self.results = Results()

    def turns(self, pages: int, repeats: int | None = None, tight: int | None = None) -> Iterator[Index]:
        """An empty index of each kind, for each repeat; no two of them are alive at once. tight: pages of those that
        evict for themselves.
        """
        for repeat in range(repeats or self.sizes.repeats):
            first = repeat % len(self.makers)
            for make in (*self.makers[first:], *self.makers[:first]):
                index = make(tight if tight and make is VllmBlockPool else pages)
                with quiet():
                    yield index
                self._close([index])

    def floor(self, row: str, prompts: Sequence[Tokens]) -> None:
        """One memcmp over each prompt's bytes."""
        kept = [prompt.tobytes() for prompt in prompts]
        for _ in range(self.sizes.repeats):
            with quiet():
                pairs = ((one, prompt.tobytes()) for one, prompt in zip(kept, prompts, strict=True))
                self.results.add_calls(row, FLOOR, each(lambda pair: pair[0] == pair[1], pairs))

    def shared_prefix(self) -> None:
        """W1, the first-page miss, and eviction by 64 pages."""
        size, asked, add = self.sizes.sequences, self.sizes.asked, self.results.add_calls
        sequence = workloads.shared_prefix(size)
        pages = (workloads.SHARED_TOKENS + size * workloads.OWN_TOKENS) // PAGE_TOKENS
        for index in self.turns(pages):
            prepare = index.prepare
            self._insert(index, "W1", (sequence(i) for i in range(size)))
            picked = range(0, size, size // asked)
            add("W1 lookup", index.name, each(index.lookup, (prepare(sequence(i)) for i in picked)))
            others = range(1, size, size // asked)  # not yet looked up, as those that lookups began with
            self._match(index, "W1", [sequence(i) for i in others])
            missing = (prepare(workloads.missing(sequence(i))) for i in picked)
            add(MISS, index.name, each(index.lookup, missing))
            if isinstance(index, CacheIndex):
                add("W1 acquire + close", index.name, each(index.hold, (prepare(sequence(i)) for i in others)))
            add(EVICT, index.name, each(index.evict, [64] * asked), per=64)
        self.floor("W1 lookup", [sequence(i) for i in range(asked)])

    def _insert(self, index: Index, work: str, sequences: Iterator[Tokens]) -> None:
        if not isinstance(index, CacheIndex):
            spent = each(index.insert, (index.prepare(one) for one in sequences))
            self.results.add_calls(f"{work} insert", index.name, spent)
            return
        whole, commit, _ = zip(*(index.request(one, one) for one in sequences), strict=True)
        self.results.add_calls(f"{work} insert: acquire to close", index.name, list(whole))
        self.results.add_calls(f"{work} insert: commit alone", index.name, list(commit))

    def _match(self, index: Index, work: str, prompts: Sequence[Tokens]) -> None:
        if isinstance(index, SglangRust):
            spent = each(index.match, map(index.prepare, prompts))
            self.results.add_calls(f"{work} bare match", index.name, spent)

    def chats(self) -> None:
        """W2: at each turn a lookup of the prompt, then prompt and answer inserted. Every other lookup is one of the
        calls that are compared with lookups, so that each finds the path as cold.
        """
        work = workloads.chats(self.sizes.chats)
        add = self.results.add_calls
        pages = sum(-(-len(one) // PAGE_TOKENS) for one in work.sequences)
        for index in self.turns(pages):
            lookup: list[int] = []
            hold: list[int] = []
            match: list[int] = []
            whole: list[int] = []
            commit: list[int] = []
            for i, turn in enumerate(work.turns):
                sequence = work.sequences[turn.chat][: turn.answer_end]
                prompt = index.prepare(sequence[: turn.prompt_end])
                if i % 2 and isinstance(index, CacheIndex):
                    hold += each(index.hold, [prompt])
                elif i % 2 and isinstance(index, SglangRust):
                    match += each(index.match, [prompt])
                else:
                    lookup += each(index.lookup, [prompt])
                if isinstance(index, CacheIndex):
                    spent = index.request(index.prepare(sequence[: turn.prompt_end]), index.prepare(sequence))
                    whole.append(spent.whole)
                    commit.append(spent.commit)
                else:
                    whole += each(index.insert, [index.prepare(sequence)])
            add("W2 lookup", index.name, lookup)
            if isinstance(index, CacheIndex):
                add("W2 acquire + close", index.name, hold)
                add("W2 insert: acquire to close", index.name, whole)
                add("W2 insert: commit alone", index.name, commit)
            else:
                add("W2 insert", index.name, whole)
            if isinstance(index, SglangRust):
                add("W2 bare match", index.name, match)
        self.floor("W2 lookup", [work.sequences[turn.chat][: turn.prompt_end] for turn in work.turns])

    def long_prompts(self) -> None:
        """W3: prompts of 131,072 tokens, inserted once, looked up four times each."""
        prompts = workloads.long_prompts(self.sizes.prompts)
        for index in self.turns(len(prompts) * workloads.LONG_TOKENS // PAGE_TOKENS):
            self._insert(index, "W3", iter([prompt.copy() for prompt in prompts]))
            again = 4 * prompts
            self.results.add_calls("W3 lookup", index.name, each(index.lookup, map(index.prepare, again)))
            self._match(index, "W3", again)
            if isinstance(index, CacheIndex):
                self.results.add_calls("W3 acquire + close", index.name, each(index.hold, map(index.prepare, again)))
        self.floor("W3 lookup", prompts)

    def trace(self, path: Path) -> None:
        """W4: a real service's requests at a capacity of 20% of what they touch; what is over leaves before each
        insert.
        """
        work = workloads.trace(workloads.mooncake(path), self.sizes.requests)
        capacity = work.capacity_tokens // PAGE_TOKENS
        largest = max(len(work.sequence(i)) for i in range(work.count)) // PAGE_TOKENS
        for index in self.turns(capacity + largest, min(3, self.sizes.repeats), capacity):
            spent, hits = replay(index, work)
            self.results.add("W4 cost: lookup, insert, evict", index.name, spent)
            if work.count == FULL_TRACE:
                self.results.add("W4 hit", index.name, hits)

    def leaves(self) -> None:
        """Evict one page at a time from trees with many leaves, each a page of its own below one common page. Each tree
        is built once; the repeats go on where the last one ended.
        """
        for count in self.sizes.leaves:
            indexes = [make(count + 1) for make in self.makers]
            if count > self.sizes.peer_leaves:
                indexes = [index for index in indexes if isinstance(index, CacheIndex | PlainIndex)]
            prompt = np.zeros(2 * PAGE_TOKENS, np.int32)
            for leaf in range(count):
                prompt[PAGE_TOKENS] = leaf
                for index in indexes:
                    index.insert(index.prepare(prompt))
            calls = min(count // 2 // self.sizes.repeats, 1000)
            for _ in range(self.sizes.repeats):
                for index in indexes:
                    with quiet():
                        spent = each(index.evict, [1] * calls)
                    self.results.add_calls(f"evict 1 page of {count:,} leaves", index.name, spent)
            self._close(indexes)

    @staticmethod
    def _close(indexes: Sequence[Index]) -> None:
        for index in indexes:
            if isinstance(index, CacheIndex):
                index.cache.close()

    def decode(self) -> None:
        """append and commit of one token, over a short and a long history: the median of runs of 16, so that every run
        has one page border.
        """
        for size in HISTORY:
            for _ in range(self.sizes.repeats):
                index = CacheIndex((size + self.sizes.steps) // PAGE_TOKENS + 1)
                prompt = np.arange(size, dtype=np.int32)
                tokens = list(np.arange(PAGE_TOKENS, dtype=np.int32)[:, None])
                with quiet(), index.cache, index.cache.acquire(index.namespace, prompt) as lease:
                    lease.append(size)
                    lease.commit(prompt)
                    spent = each(partial(decode_tokens, lease), [tokens] * (self.sizes.steps // PAGE_TOKENS))
                self.results.add_calls(f"decode step at {size:,} tokens", index.name, spent, per=PAGE_TOKENS)

    def memory(self) -> None:
        """Bytes that Python and numpy hold for each 1,000 cached tokens of W2's shape; leases closed, no tiers."""
        work = workloads.chats(self.sizes.memory_chats)
        pages = sum(-(-len(one) // PAGE_TOKENS) for one in work.sequences)
        for make in (CacheIndex, PlainIndex):
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            index = make(pages)
            opened = tracemalloc.get_traced_memory()[0]
            for turn in work.turns:
                index.insert(work.sequences[turn.chat][: turn.answer_end])
            after = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            if isinstance(index, CacheIndex):
                tokens = index.cache.stats().cached_tokens
                self.results.add("W2 memory: tree and pool", index.name, (after - before) / tokens * 1000)
                index.cache.close()
            else:
                tokens = index.cached_pages * PAGE_TOKENS
            self.results.add("W2 memory: tree", index.name, (after - opened) / tokens * 1000)
        self.results.add("W2 memory: tree", FLOOR, 4000.0)


def measure(sizes: Sizes, trace: Path | None, makers: Sequence[Maker]) -> Run:
    """Everything, in order."""
    run = Run(sizes, makers)
    with frozen():
        for part in (run.shared_prefix, run.chats, run.long_prompts, run.decode, run.memory):
            part()
        if trace is not None:
            run.trace(trace)
        run.leaves()
    return run


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse options, run, print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench index", description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="seconds instead of minutes; its figures mean little")
    size.add_argument("--full", action="store_true", help="memory over 10 million tokens")
    parser.add_argument("--trace", type=Path, help="Mooncake conversation trace for W4 (.jsonl or .jsonl.zst)")
    parser.add_argument("--peers", action="store_true", help="other engines' indexes, as far as they are installed")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--repeats", type=int, help="of each measurement (default 5)")
    options = parser.parse_args(arguments)
    values = asdict(QUICK if options.quick else Sizes())
    if options.full:
        values["memory_chats"] = FULL_CHATS
    if options.repeats:
        values["repeats"] = options.repeats
    about = machine()
    print(" · ".join(f"{name} {value}" for name, value in about.items()))
    makers: list[Maker] = [CacheIndex, PlainIndex]
    if options.peers:
        makers += peers.available(print)
    if options.trace is None:
        print("W4 is skipped: it needs --trace PATH to a Mooncake conversation trace")
    run = measure(Sizes(**values), options.trace, makers)
    records = [record for rule in rules(values["leaves"]) if (record := judge(rule, run.results))]
    print(table(records, [name for name in peers.NAMES if any(name in record["peers"] for record in records)]))
    if options.json is not None:
        report = {"machine": about, "sizes": values, "rows": records, "repeats": run.results.rows()}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
