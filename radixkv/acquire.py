"""Acquire: match, pin, take pages, start loads. All or nothing."""

from __future__ import annotations

from dataclasses import replace
from weakref import ref

from numpy import frombuffer

from radixkv.coverage import Part, cover
from radixkv.errors import OutOfPages
from radixkv.estimate import Decision, Step, decide
from radixkv.holding import Said
from radixkv.keys import SHORT_BYTES, Namespace, check_signs
from radixkv.lease import Lease
from radixkv.loading import MOVE, REQUEST, RESUME, Purpose, begin, usable
from radixkv.match import Found, find
from radixkv.node import HOST, Node, Root, State, Tail
from radixkv.plan import LoadPlan, ReadPlan
from radixkv.plane import EAGER_STORES, Plane
from radixkv.types import INT32, Tokens


def acquire(
    plane: Plane,
    namespace: Namespace,
    prompt: Tokens,
    reserve: int,
    purpose: Purpose = REQUEST,
    said: Said | None = None,
    *,
    checked: bool = True,
) -> Lease:
    """A lease on ``prompt``, as it is matched; ``reserve`` tokens beyond it have pages set aside. checked: whether its
    signs have been looked at. Raises OutOfPages or InvalidTokens, taking nothing.
    """
    core, tree, size = plane.core, plane.tree, plane.tree.page_tokens
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
        parts, covered = cover(plane.residency, root, found, known, covered)
        if parts and purpose is not MOVE:
            decision, covered = _weigh(plane, found, parts, covered, tokens)
            parts, left = parts[: decision.parts], parts[decision.parts :]
        if parts:
            found.partial, found.partial_tokens = None, 0
            device = base
    cached = covered if covered < tokens else usable(tokens, covered, purpose)
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
    if parts or reserve:
        try:
            begin(lease, parts, reserve, purpose)
        except OutOfPages:
            lease.abandon()
            raise
    counters = core.counters
    if purpose is REQUEST:
        uses = root.uses
        uses.queries += 1
        uses.queried_tokens += tokens
        if not parts:
            uses.device_hit_tokens += device if device < cached else cached
    elif purpose is RESUME:
        counters.resumed_queries += 1
        counters.resumed_tokens += tokens
        if not parts:
            counters.resumed_hit_tokens += cached
    counters.shared_pages += found.device_pages + (found.partial is not None)
    if left:
        plane.loads.refresh(left[0].record)
    if plane.stores.jobs:
        plane.stores.offer(EAGER_STORES)
    return lease


def _weigh(plane: Plane, found: Found, parts: list[Part], covered: int, prompt: int) -> tuple[Decision, int]:
    """How many leading parts are worth loading, and the tokens covered with them."""
    core, ahead, size = plane.core, plane.core.under_way, plane.tree.page_tokens
    have = found.device_tokens(size)
    steps, page = list[Step](), found.device_pages
    for part in parts:
        page += part.pages
        nbytes = plane.residency.tokens(part.record) * core.layout.token_bytes
        from_disk = part.record.tiers[HOST].state is not State.READY
        steps.append(Step(max(have, min(page * size, covered)), nbytes, from_disk))
    decision = decide(core.estimates, have, prompt, steps, disk_ahead=ahead[ReadPlan], host_ahead=ahead[LoadPlan])
    if decision.parts < len(parts) and not steps[decision.parts].from_disk and core.estimates.host_is_due():
        count, every = decision.parts + 1, decision.tokens + decision.skipped_tokens
        tokens = steps[count - 1].covered - have
        decision = replace(decision, parts=count, tokens=tokens, skipped_tokens=every - tokens)
        covered = have + tokens
    if decision.parts < len(parts):
        core.counters.recomputed_tokens += decision.skipped_tokens
        covered = steps[decision.parts - 1].covered if decision.parts else have
    return decision, covered


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
            node.reused_end = node.end
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
