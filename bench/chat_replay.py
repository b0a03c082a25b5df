"""Multi-turn chat on a real model, on CPU: what the cache gains, and what it costs where it cannot gain.

Each turn runs three times: with the cache; as the same new tokens over a context that is already resident (what the
cache can reach at best); and with the cache off. Then prompts that share nothing run with the cache, with it off, and
with leases taken outside the timer. ``python -m bench chat_replay --help``; docs/benchmarks.md says how to read it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

import radixkv
from bench.resident import Resident
from bench.timing import frozen, machine, quiet
from radixkv.integrations.engine import Engine
from radixkv.integrations.models import layout_for, namespace_for, text_config
from radixkv.types import Tokens

TTFT_TARGET, NO_REUSE_TARGET = 1.15, 1.01


@dataclass(frozen=True, slots=True)
class Load:
    """What is replayed. Lengths in tokens. think_s: mean of the exponential pauses of a client, which decide in what
    order clients come back (nobody sleeps). device_share: of all KV, what the device holds; the host holds the rest.
    pairs: prompts of the part without reuse.
    """

    clients: int = 4
    rounds: int = 4
    system: int = 256
    request: int = 96
    output: int = 32
    think_s: float = 10.0
    seed: int = 1
    device_share: float = 1.0
    pairs: int = 8

    def order(self) -> list[tuple[int, int]]:
        """(client, round) in order of arrival."""
        rng = np.random.default_rng(self.seed)
        arrivals = rng.exponential(self.think_s, (self.clients, self.rounds)).cumsum(axis=1)
        turns = [(client, turn) for client in range(self.clients) for turn in range(self.rounds)]
        return sorted(turns, key=lambda at: (arrivals[at], at[1], at[0]))

    @property
    def chat_tokens(self) -> int:
        """Tokens of one chat at its end."""
        return self.system + self.rounds * (self.request + self.output)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. Times to the first token in seconds, and the processor's time for the same (closing included). same:
    all three chose the same first token.
    """

    client: int
    round: int
    prompt_tokens: int
    cached_tokens: int
    cached_s: float
    resident_s: float
    off_s: float
    cached_cpu_s: float
    resident_cpu_s: float
    off_cpu_s: float
    same: bool


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt length that nothing was cached of. Seconds of a whole request, and of the processor: with the cache,
    with it off, and computed alone.
    """

    cached_s: float
    off_s: float
    bare_s: float
    cached_cpu_s: float
    off_cpu_s: float
    bare_cpu_s: float


class Bench:
    """A model, the cache under test and a second one for what it is compared with."""

    def __init__(self, model: Any, load: Load) -> None:
        self.load = load
        self.vocabulary = text_config(model).vocab_size
        layout = layout_for(model)
        page, chats = layout.page_tokens, load.clients * load.chat_tokens
        one = max(load.chat_tokens, load.system + load.request + load.output) // page + 2
        pages = max(one, int(-(-chats // page) * load.device_share) + load.clients) + one
        host = 0 if load.device_share >= 1 else (2 * chats // layout.chunk_tokens + load.clients) * layout.chunk_bytes
        self.cache = radixkv.open(
            radixkv.Config(
                layout, device=radixkv.DeviceConfig(pages=pages), host=radixkv.HostConfig(capacity_bytes=host)
            )
        )
        room = radixkv.DeviceConfig(pages=(load.clients + 1) * one)
        self.yardstick = radixkv.open(radixkv.Config(layout, device=room))
        namespace = namespace_for(model, model_id="bench")
        self.engine = Engine(model, self.cache, namespace)
        self.off = Engine(model, self.yardstick, namespace, use_cache=False)
        self.model, self.namespace = model, namespace

    def close(self) -> None:
        """Close both caches."""
        self.cache.close()
        self.yardstick.close()

    def tokens(self, count: int, *seed: int) -> Tokens:
        """Random tokens, the same for the same seed."""
        rng = np.random.default_rng((self.load.seed, *seed))
        return rng.integers(0, self.vocabulary, count, dtype=np.int32)

    def replay(self) -> list[Turn]:
        """All turns, in order of arrival; what runs first changes from turn to turn."""
        load, out = self.load, list[Turn]()
        chats = [self.tokens(load.system, 0) for _ in range(load.clients)]
        with ExitStack() as stack:
            residents = [
                stack.enter_context(Resident(self.model, self.yardstick, self.namespace)) for _ in range(load.clients)
            ]
            for at, (client, turn) in enumerate(load.order()):
                prompt = np.concatenate((chats[client], self.tokens(load.request, 1, client, turn)))
                out.append(self._turn(at, client, turn, prompt, residents[client]))
                answer = self.engine.generate(prompt, load.output)  # the first token again, then the rest
                chats[client] = np.concatenate((prompt, np.array(answer.tokens, np.int32)))
                self.cache.tick()
        return out

    def _turn(self, at: int, client: int, turn: int, prompt: Tokens, resident: Resident) -> Turn:
        have = self.cache.lookup(self.namespace, prompt).usable_tokens
        resident.place(prompt, have)
        runs: list[Callable[[], tuple[float, int]]] = [
            lambda: first_token(self.engine, prompt),
            lambda: resident.first_token(prompt),
            lambda: first_token(self.off, prompt),
        ]
        found: list[tuple[float, int]] = [(0.0, 0)] * 3
        cpu = [0.0] * 3
        for i in range(3):
            which = (at + i) % 3
            with quiet():
                before = process_time()
                found[which] = runs[which]()
                cpu[which] = process_time() - before
        cached, resident_s, off = (seconds for seconds, _ in found)
        same = len({token for _, token in found}) == 1
        return Turn(client, turn, len(prompt), have, cached, resident_s, off, cpu[0], cpu[1], cpu[2], same)

    def no_reuse(self) -> list[Pair]:
        """Prompts that share nothing, each one whole request in three ways."""
        load, out = self.load, list[Pair]()
        for i in range(load.pairs):
            seconds, cpu = [0.0] * 3, [0.0] * 3
            for j in range(3):
                which = (i + j) % 3
                prompt = self.tokens(load.system + load.request, 2, i, which)
                with Resident(self.model, self.yardstick, self.namespace) as bare, quiet():
                    if which == 2:
                        bare.place(prompt, 0)
                    before = process_time()
                    if which < 2:
                        seconds[which] = (self.engine, self.off)[which].generate(prompt, load.output).total_s
                    else:
                        seconds[which] = bare.answer(prompt, load.output)
                    cpu[which] = process_time() - before
            out.append(Pair(*seconds, *cpu))
        return out


def first_token(engine: Engine, prompt: Tokens) -> tuple[float, int]:
    """Seconds to the first token, and the token."""
    found = engine.generate(prompt, 1)
    return found.first_token_s, found.tokens[0]


def tiny_model(dtype: str) -> Any:
    """A random Llama of three layers, the same weights each time, whose output depends on its whole context."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=172,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


def ratios(rows: Sequence[Turn] | Sequence[Pair], over: str, under: str) -> dict[str, float]:
    """Of two columns: the median of the rows' ratios by the clock, by the processor's time, and their quartiles."""
    wall = [getattr(row, f"{over}_s") / getattr(row, f"{under}_s") for row in rows]
    cpu = [getattr(row, f"{over}_cpu_s") / getattr(row, f"{under}_cpu_s") for row in rows]
    low, _, high = statistics.quantiles(wall, n=4, method="inclusive") if len(wall) > 1 else wall * 3
    return {"median": statistics.median(wall), "low": low, "high": high, "cpu": statistics.median(cpu)}


def summary(turns: Sequence[Turn], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Medians by round, the ratios that have targets, and whether each is met."""
    rounds = []
    for turn in sorted({t.round for t in turns}):
        here = [t for t in turns if t.round == turn]
        row: dict[str, Any] = {"round": turn, "turns": len(here)}
        for name in ("prompt_tokens", "cached_tokens", "cached_s", "resident_s", "off_s"):
            row[name] = statistics.median(getattr(t, name) for t in here)
        row["to_resident"], row["to_off"] = ratios(here, "cached", "resident"), ratios(here, "off", "cached")
        rounds.append(row)
    out: dict[str, Any] = {"rounds": rounds, "same_first_tokens": all(t.same for t in turns)}
    out["to_resident"] = ratios(turns, "cached", "resident")
    out["to_resident_met"] = out["to_resident"]["median"] <= TTFT_TARGET
    if pairs:
        out["no_reuse_to_off"], out["no_reuse_to_bare"] = (ratios(pairs, "cached", name) for name in ("off", "bare"))
        out["no_reuse_to_off_met"] = out["no_reuse_to_off"]["median"] <= NO_REUSE_TARGET
    return out


def show(found: dict[str, Any]) -> None:
    """Print a summary."""
    print("round  prompt  cached  | time to first token, ms: cache  resident       off  | cache/resident  off/cache")
    for row in found["rounds"]:
        cache, resident, off = (1000 * row[name] for name in ("cached_s", "resident_s", "off_s"))
        print(
            f"{row['round']:5}  {row['prompt_tokens']:6.0f}  {row['cached_tokens']:6.0f}  | {cache:30.1f}  "
            f"{resident:8.1f}  {off:8.1f}  | {row['to_resident']['median']:14.3f}  {row['to_off']['median']:9.2f}"
        )
    said = {True: "met", False: "NOT MET", None: ""}
    for name, text, target in (
        ("to_resident", "cache / resident, all turns", TTFT_TARGET),
        ("no_reuse_to_off", "no reuse, cache / off", NO_REUSE_TARGET),
        ("no_reuse_to_bare", "no reuse, cache / computed alone", None),
    ):
        if name in found:
            r, verdict = found[name], said[found.get(f"{name}_met")]
            aim = f", target {target}: {verdict}" if target else ""
            print(
                f"{text}: {r['median']:.3f} (quartiles {r['low']:.3f} to {r['high']:.3f}, by CPU {r['cpu']:.3f}){aim}"
            )
    print("first tokens are the same in all three" if found["same_first_tokens"] else "FIRST TOKENS DIFFER")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse options, replay, print."""
    parser = argparse.ArgumentParser(prog="python -m bench chat_replay", description=__doc__)
    defaults = Load()
    for name, value in asdict(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default {value}")
    parser.add_argument("--model", default="smollm", help="smollm (default), tiny, or a transformers folder")
    parser.add_argument("--dtype", default="bfloat16", help="default bfloat16")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = vars(parser.parse_args(arguments))
    load = Load(**{name: options[name] for name in asdict(defaults)})
    import torch

    from radixkv.integrations.smollm import load_model

    torch.set_num_threads(1)  # more threads on few shared cores are slower
    which, dtype = options["model"], options["dtype"]
    model = tiny_model(dtype) if which == "tiny" else load_model(None if which == "smollm" else which, dtype)[0]
    about = machine() | {"torch": torch.__version__, "model": f"{which} {dtype}"}
    print(" · ".join(f"{name} {value}" for name, value in about.items()))
    bench, began = Bench(model, load), perf_counter()
    try:
        first_token(bench.off, bench.tokens(64, 3))  # packs weights, warms up
        with frozen():
            turns, pairs = bench.replay(), bench.no_reuse()
        hits = bench.cache.stats()
    finally:
        bench.close()
    found = summary(turns, pairs)
    show(found)
    print(f"hits: {hits.device_hit_tokens:,} tokens on the device, {hits.host_hit_tokens:,} in host memory", end="")
    print(f"; {perf_counter() - began:.0f} s in all")
    if options["json"] is not None:
        report: dict[str, Any] = {"machine": about, "load": asdict(load), "summary": found}
        report |= {"turns": [asdict(t) for t in turns], "no_reuse": [asdict(p) for p in pairs]}
        options["json"].write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
