"""radixkv inside an engine: a toy transformer whose K and V live on the cache's pages."""

import torch

import radixkv
from radixkv.gpu.reference import TorchDevice

torch.manual_seed(0)
LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY = 2, 4, 2, 32, 1000
WIDTH = HEADS * DIM
embedding, positions = torch.randn(VOCABULARY, WIDTH), torch.randn(512, WIDTH)
head = torch.randn(WIDTH, VOCABULARY)
project = torch.randn(LAYERS, WIDTH, (HEADS + 2 * KV_HEADS) * DIM) / WIDTH**0.5

layout = radixkv.KVLayout.full(layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, dtype="float32", chunk_tokens=64)
config = radixkv.Config(
    layout=layout,
    device=radixkv.DeviceConfig(pages=64),
    host=radixkv.HostConfig(capacity_bytes=16 * layout.chunk_bytes),
)
device = TorchDevice(layout, config.device.pages)  # owns the page tensors; the cache decides what is on them


def step(lease: radixkv.Lease, tokens: list[int]) -> int:
    """Run the model over new tokens, publish their KV, return the next token."""
    x = embedding[tokens] + positions[lease.length : lease.length + len(tokens)]
    slots = lease.append(len(tokens))  # where each new token's K and V go; -1: already there
    for layer in range(LAYERS):
        qkv = (x @ project[layer]).view(len(tokens), -1, DIM)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        device.write(layer, slots, k, v)
        out, _ = device.attention(layer, q, [lease.block_table], [lease.length], query_lengths=[len(tokens)])
        x = x + out.flatten(1)
    lease.commit(tokens)  # from here on other requests can share it
    return int((x[-1] @ head).argmax())


def answer(cache: radixkv.Cache, ns: radixkv.Namespace, prompt: list[int], count: int) -> list[int]:
    with cache.acquire(ns, prompt, reserve_tokens=count) as lease:  # match, pin, take pages; returns at once
        lease.wait()  # loads from host or disk have ended, here there are none
        print(f"{len(prompt)} prompt tokens, {lease.cached_tokens} tokens from the cache")
        generated = [step(lease, prompt[lease.length :])]
        while len(generated) < count:
            generated.append(step(lease, generated[-1:]))
        other = lease.fork()  # shares every page; the first write into a shared page copies it
        print("two continuations:", step(lease, [1]), step(other, [2]))
        other.close()
    return generated


cache = radixkv.open(config, device=device)
ns = radixkv.Namespace(model="toy", revision="seed 0")
system = list(range(100, 200))
first = answer(cache, ns, [*system, 7, 8, 9], count=8)
second = answer(cache, ns, [*system, 11, 12], count=8)  # the shared prefix is not computed again
assert second == answer(cache, radixkv.Namespace(model="toy", salt="no sharing"), [*system, 11, 12], count=8)
print(f"hit rate {cache.stats().hit_rate:.2f}, {cache.stats().cow_copies} pages copied on write")
cache.close()
