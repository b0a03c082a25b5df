"""What no kernel takes is refused, with what is supported."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from radixkv.errors import ConfigError
from radixkv.gpu.decode import DecodePlan
from radixkv.gpu.limits import check_card
from radixkv.gpu.merge import merge_states
from radixkv.gpu.packing import gather
from radixkv.gpu.pages import copy_pages, write
from radixkv.gpu.prefill import PrefillPlan

SHAPE: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "page_tokens": 16, "device": "cpu"}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"head_dim": 100}, "supported: 16, 32, 64, 80, 96, 128, 192, 256"),
        ({"page_tokens": 24}, "supported: 8, 16, 32, 64, 128"),
        ({"q_heads": 34}, "supported: 1, 2, 3"),
        ({"q_heads": 5}, "no positive multiple of 2"),
        ({"kv_dtype": torch.float8_e5m2}, r"float8_e5m2 is not supported; supported: torch.bfloat16.*int8"),
        ({"kv_dtype": torch.float16}, "queries of torch.float16"),
        ({"kv_dtype": torch.int8}, "per token and head"),
        ({"q_dtype": torch.float64}, "query type torch.float64 is not supported"),
        ({"window": -1}, "negative"),
        ({"softcap": -1.0}, "negative"),
        ({"softcap": math.nan}, "softcap nan"),
        ({"scale": 0.0}, "scale 0.0 must be positive"),
        ({"scale": math.inf}, "scale inf must be positive and finite"),
    ],
)
def test_plans_refuse(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DecodePlan(3, **{**SHAPE, **wrong})
    with pytest.raises(ConfigError, match=says):
        PrefillPlan(3, 10, **{**SHAPE, **wrong})


def test_plans_refuse_a_batch_of_none_or_too_many() -> None:
    for batch in (0, 4097):
        with pytest.raises(ConfigError, match=f"batch {batch} is outside"):
            DecodePlan(batch, **SHAPE)


@pytest.mark.parametrize(("queries", "parts"), [(0, None), (-8, None), (10, 0), (10, -1)])
def test_a_prefill_of_nothing_is_refused(queries: int, parts: int | None) -> None:
    """A grid of no parts is launched without an error, and leaves the results as they were."""
    with pytest.raises(ConfigError, match=f"max_queries {queries} and parts {parts} must be at least 1"):
        PrefillPlan(3, queries, parts=parts, **SHAPE)
    assert PrefillPlan(3, 1, parts=1, **SHAPE).parts == 1


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_scales_of_a_tensor_are_positive_and_its_own(where: str, scale: float) -> None:
    fp8 = torch.zeros(3, 16, 2, 64, dtype=torch.float8_e4m3fn, device=where)
    k, slots = torch.ones(1, 2, 64, device=where), torch.zeros(1, dtype=torch.int64, device=where)
    plan = DecodePlan(1, **{**SHAPE, "device": where, "kv_dtype": torch.float8_e4m3fn, "q_dtype": torch.float16})
    q, tables = torch.zeros(1, 4, 64, device=where).half(), torch.zeros(1, 1, dtype=torch.int32, device=where)
    wrong: tuple[dict[str, Any], ...] = ({"k_scale": scale}, {"v_scale": scale})
    for scales in wrong:
        with pytest.raises(ValueError, match=f"scale {scale}.* must be positive and finite"):
            write(fp8, fp8.clone(), slots, k, k, **scales)
        with pytest.raises(ValueError, match=f"scale {scale}.* must be positive and finite"):
            plan.run(q, fp8, fp8, tables, **scales)
    with pytest.raises(ValueError, match="given for pages without a scale per tensor"):
        write(fp8.float(), fp8.float(), slots, k, k, k_scale=0.5)
    write(fp8.float(), fp8.float(), slots, k, k, k_scale=1.0)


def test_tensors_that_do_not_fit_are_refused(where: str) -> None:
    plan = DecodePlan(2, **{**SHAPE, "device": where})
    q = torch.zeros(2, 4, 64, dtype=torch.bfloat16, device=where)
    pages = torch.zeros(3, 16, 2, 64, dtype=torch.bfloat16, device=where)
    tables = torch.zeros(2, 1, dtype=torch.int32, device=where)
    with pytest.raises(ValueError, match="lengths must be contiguous int32"):
        plan.schedule(torch.zeros(2, dtype=torch.int64, device=where))
    for arguments, says in (
        ((q[:1], pages, pages, tables), "q must be"),
        ((q, pages.half(), pages, tables), "k_pages is"),
        ((q, pages, pages[:, :8], tables), "v_pages is"),
        ((q, pages, pages, tables.long()), "block tables must be int32"),
    ):
        with pytest.raises(ValueError, match=says):
            plan.run(*arguments)
    with pytest.raises(ValueError, match="out must be contiguous"):
        plan.run(q, pages, pages, tables, out=q.float())
    with pytest.raises(ValueError, match="sinks must be"):
        plan.run(q, pages, pages, tables, sinks=q[0, :, 0])
    with pytest.raises(ValueError, match="scales were given"):
        plan.run(q, pages, pages, tables, k_scales=q[..., 0].float())


def test_scales_of_k_and_v_lie_alike(where: str) -> None:
    """The kernels read both by the strides of K's."""
    pages = torch.zeros(3, 16, 2, 64, dtype=torch.int8, device=where)
    shape: dict[str, Any] = {"q_heads": 2, "kv_heads": 2, "head_dim": 64, "page_tokens": 16, "device": where}
    plan = DecodePlan(1, q_dtype=torch.float16, kv_dtype=torch.int8, per_token_head=True, **shape)
    q, tables = torch.zeros(1, 2, 64, device=where).half(), torch.zeros(1, 1, dtype=torch.int32, device=where)
    k, v = torch.ones(3, 16, 2, device=where), torch.ones(3, 2, 16, device=where).transpose(1, 2)
    with pytest.raises(ValueError, match="equal strides"):
        plan.run(q, pages, pages, tables, k_scales=k, v_scales=v)
    with pytest.raises(ValueError, match="need float32 scales"):
        plan.run(q, pages, pages, tables, k_scales=k)


def test_moves_refuse(where: str) -> None:
    kv = torch.zeros(1, 2, 3, 16, 2, 64, device=where)
    ids = torch.zeros(2, dtype=torch.int32, device=where)
    with pytest.raises(ValueError, match="cannot be copied"):
        copy_pages(kv, ids, ids[:1])
    with pytest.raises(ValueError, match="contiguous"):
        copy_pages(kv.transpose(3, 4), ids, ids)
    every_other = torch.arange(4, dtype=torch.int32, device=where)[::2]  # a kernel would read 0 and 1
    for wrong in (every_other, ids.float(), ids.bool(), ids.to(torch.uint8)):
        for source, destination in ((wrong, ids), (ids, wrong)):
            with pytest.raises(ValueError, match="page ids are contiguous int32 or int64"):
                copy_pages(kv, source, destination)
    with pytest.raises(ValueError, match="are not those of pages"):
        copy_pages(kv, ids, ids, scales=kv[:, :, :2].contiguous())
    with pytest.raises(ValueError, match="tokens are int32"):
        gather(kv, ids[None], ids[:1].long(), torch.zeros(1, 99, dtype=torch.uint8, device=where))
    k = torch.zeros(2, 2, 64, device=where)
    with pytest.raises(ValueError, match="does not hold 2"):
        write(kv[0, 0], kv[0, 1], ids.long(), k[:1], k)
    with pytest.raises(ValueError, match="slots are contiguous int64"):
        write(kv[0, 0], kv[0, 1], ids, k, k)
    with pytest.raises(ConfigError, match=r"page type torch\.float64"):
        write(kv[0, 0].double(), kv[0, 1].double(), ids.long(), k, k)
    with pytest.raises(ValueError, match="need float32 lses"):
        merge_states(k, k)


def test_fp8_pages_are_refused_on_cards_that_cannot_convert_them(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda")
    for capability, served in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, is_of=capability: is_of)
        check_card(card, torch.int8)
        if served:
            check_card(card, torch.float8_e4m3fn)
        else:
            with pytest.raises(ConfigError, match=r"needs compute capability 8.9.*supported: torch.bfloat16.*int8"):
                check_card(card, torch.float8_e4m3fn)
            with pytest.raises(ConfigError, match=r"needs compute capability 8.9"):
                DecodePlan(3, **{**SHAPE, "device": "cuda", "kv_dtype": torch.float8_e4m3fn})
    check_card(torch.device("cpu"), torch.float8_e4m3fn)


def test_a_write_asks_what_the_card_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("radixkv.gpu.limits.check_card", lambda device, dtype: asked.append((device.type, dtype)))
    pages = torch.zeros(2, 16, 2, 64, dtype=torch.int8)
    none, rows = torch.zeros(0, dtype=torch.int64), torch.zeros(2, 16, 2)
    new = torch.zeros(0, 2, 64)
    write(pages, pages.clone(), none, new, new, k_scales=rows, v_scales=rows)
    assert asked == [("cpu", torch.int8)]
