"""Acquire: match, pin, take pages, start loads. All or nothing."""

from __future__ import annotations

from dataclasses import replace
from weakref import ref

from numpy import frombuffer

from radixkv.coverage import Part, cover
from radixkv.estimate import Decision, Step, decide
from radixkv.holding import Said, begin
from radixkv.keys import SHORT_BYTES, Namespace, check_signs
from radixkv.lease import Lease
from radixkv.match import Found, find
from radixkv.node import Node, Root, Tail, Uses
from radixkv.plan import LoadPlan, ReadPlan
from radixkv.plane import EAGER_STORES, Plane
from radixkv.types import INT32, Tokens


def acquire(
    plane: Plane,
    namespace: Namespace,
    prompt: Tokens,
    reserve: int,
    said: Said | None = None,
    *,
    resume: bool = False,
    move: bool = False,
    checked: bool = True,
) -> Lease:
    """A lease on ``prompt``, as it is matched; ``reserve`` tokens beyond it have pages set aside. resume: of a
    preempted request that comes back. move: of a prefetch, which is no request and computes nothing. checked: whether
    the signs have been looked at. Raises OutOfPages or InvalidTokens, taking nothing.
    """
    core, tree, size = plane.core, plane.tree, plane.tree.page_tokens
    if core.news:
        plane.drain()
    root = tree.roots.get(namespace.digest) or tree.peek(namespace, core.storage)
    if not checked and (root is None or core.media.names):
        check_signs(prompt)
        checked = True
    if root is None or root.namespace is None:
        root = tree.root(namespace, core.storage)
    known = prompt if said is None or said.limit is None else prompt[: said.limit]
    found = find(tree, root, known)
    tokens, base = len(prompt), found.device_pages * size
    rest = prompt[base:].tobytes()
    if not checked and found.pages * size < tokens and (len(rest) > SHORT_BYTES or not rest[3::4].isascii()):
        check_signs(prompt, base)
    device = covered = base + found.partial_tokens
    parts: list[Part] = []
    left: list[Part] = []
    decision: Decision | None = None
    if tree.n_records and covered < len(known):
        parts = cover(plane.residency, root, found, known, covered)
        if parts and not move:
            decision = _weigh(plane, covered, parts, tokens)
            parts, left = parts[: decision.parts], parts[decision.parts :]
        if parts:
            found.partial, found.partial_tokens = None, 0
            device, covered = base, parts[-1].covered
    last = tokens if move or not tokens else tokens - 1  # a request computes its last token, for the logits
    cached = covered if covered < last else last
    node, depth, ids = _take_path(plane, root, found)
    if cached < base:  # all of the prompt is there: its last token, which is yet to be committed, is in the last page
        base -= size
        rest = prompt[base:].tobytes()
    lease = Lease(
        plane, root, namespace, tokens, said, node, depth, frombuffer(ids, INT32), len(ids) >> 2, device, covered,
        covered, cached, cached, cached, base, rest,
    )  # fmt: skip
    plane.registry[id(lease)] = ref(lease)
    root.leases += 1
    if decision is not None:
        lease.decision = decision
    uses = tree.resumed if resume else Uses() if move else root.uses
    if parts or reserve:
        try:
            begin(lease, parts, reserve, last, uses)
        except BaseException:
            lease.abandon()
            raise
    uses.queries += 1
    uses.queried_tokens += tokens
    if not parts:
        uses.device_hit_tokens += cached
    core.counters.shared_pages += found.device_pages + (found.partial is not None)
    if left:
        plane.loads.refresh(left[0].record)
    if plane.stores.jobs:
        plane.stores.offer(EAGER_STORES)
    return lease


def _weigh(plane: Plane, have: int, parts: list[Part], prompt: int) -> Decision:
    """How many leading parts are worth loading, where the device has ``have`` tokens of ``prompt``."""
    core, ahead = plane.core, plane.core.under_way
    steps = [Step(part.covered, plane.residency.bytes(part.record), part.from_disk) for part in parts]
    decision = decide(core.estimates, have, prompt, steps, disk_ahead=ahead[ReadPlan], host_ahead=ahead[LoadPlan])
    count = decision.parts
    if count < len(parts) and not parts[count].from_disk and core.estimates.host_is_due():
        every, tokens = decision.tokens + decision.skipped_tokens, parts[count].covered - have
        decision = replace(decision, parts=count + 1, tokens=tokens, skipped_tokens=every - tokens)
    core.counters.recomputed_tokens += decision.skipped_tokens
    return decision


def stamp(plane: Plane, found: Found) -> None:
    """Split at the end of the match and stamp the matched part alone: the rest of an edge was not used."""
    tree = plane.tree
    tree.now = now = tree.now + 1
    if found.within >= 0:
        last = found.path.pop()
        if found.within:
            found.path.append(tree.split(last, found.within))
    for node in found.path:
        node.last_use = now
    if plane.core.second_use:
        for node in found.path:
            plane.residency.admit(node)
    if plane.core.disk is not None and found.path:
        plane.touched.append(found.path[-1])


def _take_path(plane: Plane, root: Root, found: Found) -> tuple[Node, int, bytes]:
    """Stamp the matched part, and take hold of it and of a partly common page.

    Returns the node and depth of the pin taken, and the page ids (int32 bytes) of the block table.
    """
    ids = found.page_ids()
    stamp(plane, found)
    depth, partial, end = found.device_pages, found.partial, found.path[-1] if found.path else root
    if end.start >= depth:
        end = end.at(depth)  # the device ends above the match
    if isinstance(partial, Tail):
        partial.last_use = plane.tree.now
        plane.pool.retain_one(partial.page)
        ids += partial.page.to_bytes(4, "little")
    elif partial is not None:  # a partial hit inside a full page: pinned one page deeper, as part of the tree
        end, depth = partial, depth + 1
        ids += partial.pages[:4]
    if end.pins or not depth:
        end.pin(depth)
    else:
        end.pins = [depth]
    return end, depth, ids
