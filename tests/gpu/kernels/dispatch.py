# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, unused-ignore"
"""What racecheck reports of a kernel that shares nothing: groups of warps, and no shared memory of its own.

``compute-sanitizer --tool racecheck python -m tests.gpu.kernels.dispatch barrier`` reports a hazard between the bytes
that the compiler hands to worker warps and their reads of them; without ``barrier``, which makes each group meet at a
barrier of its own once, none. See docs/testing.md.
"""

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def add(x, out, at, length, WARPS: gl.constexpr, MEET: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    n = at + gl.arange(0, 32 * WARPS, layout)
    if MEET:
        gl.thread_barrier()
    gl.store(out + n, gl.load(x + n, mask=n < length, other=0) + at, mask=n < length)


@gluon.jit
def dispatch_kernel(x, out, length, MEET: gl.constexpr):
    """Three groups of warps, as the prefill kernel for Hopper has them; each adds its offset to numbers of its own."""
    first = gl.program_id(0) * 288
    gl.warp_specialize([
        (add, (x, out, first, length, 4, MEET)),
        (add, (x, out, first + 128, length, 4, MEET)),
        (add, (x, out, first + 256, length, 1, MEET)),
    ], [4, 1], [240, 24])  # fmt: skip


def main() -> None:
    x = torch.randint(0, 1000, (2880,), dtype=torch.int32, device="cuda")
    out = torch.zeros_like(x)
    dispatch_kernel[(10,)](x, out, len(x), MEET="barrier" in sys.argv, num_warps=4, maxnreg=168)
    at = torch.arange(2880, device="cuda")
    groups = at // 288 * 288 + torch.where(at % 288 < 128, 0, torch.where(at % 288 < 256, 128, 256))
    assert torch.equal(out.long(), x + groups)
    print("the sums are right")


if __name__ == "__main__":
    main()
