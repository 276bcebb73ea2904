"""A device that computes nothing: it writes the KV that belongs to the requests, and checks all that they read.

Knows no vLLM but its numbers: block tables, computed tokens, tokens to compute.  `plan` says what a step reads and
writes, `run` does that for one layer, and `sample` ends the step.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tests.lab.bed import oracle
from tests.lab.bed.layouts import Group, Layer
from tests.lab.bed.step import Plan, Request, Slots, Work

NULL_BLOCK = 0  # vLLM's: it stands where a request needs no block, and holds nothing
FAULTS_KEPT = 50


@dataclass(frozen=True)
class Fault:
    """A block that held something else than what the scheduler counted as computed."""

    step: int
    rank: int
    request: str
    group: int
    block: int
    """Number of the block in the request's table."""
    block_id: int
    layer: str
    head: int
    token: int
    """Position of the first wrong token in the request."""
    wrong_tokens: int
    found: str


class Device:
    """`every_step`: compare all that a request has at each step, else only what it comes with."""

    def __init__(
        self, groups: tuple[Group, ...], vocab: int, blocks: int, *, rank: int = 0, every_step: bool = True
    ) -> None:
        self.groups, self.requests = groups, dict[str, Request]()
        self.counters, self.faults = Counter[str](), list[Fault]()
        self.draft_hits = 0.7
        """The share of drafted tokens that are right."""
        self.rewrites = False
        """Planted: what a request computes again of a hit is written into the hit's blocks, too."""
        self._window = max((group.span for group in groups if group.kind == "window" and not group.cached), default=0)
        self._vocab, self._rank, self._every_step, self._step = vocab, rank, every_step, 0
        self._guess = random.Random(1)
        keys = {layer.name: layer.key for group in groups for layer in group.layers}
        heads = max((layer.heads.stop for group in groups for layer in group.layers), default=1)
        self._witness = oracle.Witness(keys, heads * 2)  # also those of another rank
        # The prefix at the end of what each block holds, as far as the device itself filled or checked it.
        self._held = [np.zeros(blocks, dtype=np.uint64) for _ in groups]
        self._bytes = [sum(layer.words[0].nbytes for layer in group.layers) for group in groups]

    # --- what the scheduler says ------------------------------------------------------------------------------------

    def admit(
        self,
        name: str,
        tokens: Sequence[int],
        blocks: Iterable[Sequence[int]],
        computed: int,
        adapter: str = "",
        replay_start: int = 0,
    ) -> Request:
        """Take in a request that is new or comes back; its tables are whole.

        `replay_start`: where it begins to compute a hit's last window again; 0 where it does not.
        """
        request = Request(name, tokens, oracle.key_of(adapter))
        self.requests[name] = request
        self._witness.remember(name, request)
        request.blocks, request.computed = [list(each) for each in blocks], computed
        if replay_start:
            request.replayed = range(replay_start, replay_start + self._window)
        return request

    def come_back(self, name: str, tokens: Sequence[int], blocks: Iterable[Sequence[int]], computed: int) -> None:
        """Take in a request that was preempted, with these tokens."""
        before = self.requests[name]
        request = Request(name, tokens, before.seed)
        request.prompt, request.blocks, request.computed = before.prompt, [list(each) for each in blocks], computed
        self.requests[name] = request
        self._witness.remember(name, request)

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.requests.pop(name, None)

    def append(self, name: str, blocks: Iterable[Sequence[int]]) -> None:
        for table, more in zip(self.requests[name].blocks, blocks, strict=True):
            table.extend(more)

    def zero(self, blocks: Sequence[int]) -> None:
        for layer in (each for group in self.groups for each in group.layers):
            layer.words[list(blocks)] = 0

    def bytes_of(self, first: int, end: int) -> int:
        """Return how many bytes the blocks with these tokens have, of those that the next token reads."""
        found = 0
        for group, size in zip(self.groups, self._bytes, strict=True):
            if not group.cached:
                continue
            begun = max(first, group.first_needed(end)) // group.block_tokens
            found += max(0, -(-end // group.block_tokens) - begun) * size
        return found

    def lose_all(self) -> None:
        """Note that the memory is gone, and with it what the blocks held."""
        for held in self._held:
            held[:] = 0

    # --- a step -----------------------------------------------------------------------------------------------------

    def plan(self, scheduled: Mapping[str, int], drafts: Mapping[str, Sequence[int]]) -> Plan:
        """Return the step in which these requests compute so many tokens, drafts included.

        A draft below 0 is a placeholder of the scheduler's for the one that the device drafted last.
        """
        self._step += 1
        work = []
        for name, count in scheduled.items():
            request, given = self.requests[name], list(drafts.get(name, ()))
            if given and min(given) < 0:
                given = (request.drafted + [oracle.FIRST_TOKEN] * len(given))[: len(given)]
            one = Work(request, request.computed, count, given)
            assert one.start + count - len(given) <= request.known, f"{name} computes tokens that are not known: {one}"
            work.append(one)
        writes = self._writes(work)
        plan = Plan(work, self._reads(work), writes, self._copied(work))
        for each in work:
            each.request.fresh = False
        self.counters.update(steps=1, computed_tokens=sum(scheduled.values()))
        return plan

    def run(self, plan: Plan, group: Group, layer: Layer) -> None:
        """Write what a layer computes, and compare what it holds of all that the step reads.

        Attention writes first: a request may read what another one computes in the same step.  States and rings are
        read first: what is new takes the old one's place.
        """
        if group.kind in ("state", "ring"):
            self._check(plan, group, layer)
        slots = plan.writes[group.number].of(layer)
        layer.words[slots.blocks, :, slots.offsets] = self._rows(slots, layer)
        if group.kind not in ("state", "ring"):
            self._check(plan, group, layer)

    def sample(self, plan: Plan) -> dict[str, list[int]]:
        """End the step; return the tokens that each request got."""
        for number, each in enumerate(plan.work):
            request = each.request
            samples = each.samples  # before more tokens are known
            if number in plan.bad and not request.wrong:
                request.taint(each.start + each.count)
            rejected = 0
            if samples:
                each.sampled = self._accepted(request, each.drafts)
                rejected = len(each.drafts) + 1 - len(each.sampled)
            request.computed = each.start + each.count - rejected
        return {each.request.name: each.sampled for each in plan.work}

    def drafting(self, plan: Plan) -> Plan:
        """Return what a drafter's layers read and write at the end of a step, once its tokens are sampled.

        A block's last token is left out of what they read: it depends on the next block's first token, and vLLM shares
        a block among prompts that go on differently behind it. That costs it right drafts, never tokens.
        """
        reads, writes = [], []
        for group in self.groups:
            spans: list[list[tuple[int, Any, Any]]] = [[], []]
            for number, each in enumerate(plan.work):
                request, end = each.request, each.start + each.count
                following = np.zeros(end + 1, dtype=np.uint64)  # 0: of a draft that was rejected
                known = min(end + 1, request.known)
                following[:known] = request.prefix[:known]
                first = min(group.first_needed(each.start), each.start)
                read = np.arange(first, each.start)
                read = read[(read + 1) % group.block_tokens > 0]
                spans[0].append((number, read, following[read + 1]))
                spans[1].append((number, np.arange(each.start, end), following[each.start + 1 : end + 1]))
            reads.append(self._slots(group, plan.work, spans[0]))
            writes.append(self._slots(group, plan.work, spans[1]))
        return Plan(plan.work, reads, writes, Counter())

    def draft(self, name: str, count: int) -> list[int]:
        """Guess the next tokens of a request."""
        request = self.requests[name]
        prefix, position, found = request.last, request.known, list[int]()
        for _ in range(count):
            token = oracle.token_after(prefix, self._vocab)
            if self._guess.random() >= self.draft_hits:
                token = oracle.FIRST_TOKEN + (token + 1) % (self._vocab - oracle.FIRST_TOKEN)
            found.append(token)
            prefix = oracle.prefixes([token], start=position, before=prefix)[0]
            position += 1
        request.drafted = found
        return found

    def report(self) -> dict[str, Any]:
        return {**self.counters, "faults": [asdict(each) for each in self.faults]}

    def _check(self, plan: Plan, group: Group, layer: Layer) -> None:
        slots = plan.reads[group.number].of(layer)
        if not len(slots.blocks):
            return
        found, wanted = layer.words[slots.blocks, :, slots.offsets], self._rows(slots, layer)
        self.counters["checked_tokens"] += len(slots.blocks)
        same = (found == wanted).all(axis=(1, 2)) & (slots.blocks != NULL_BLOCK)
        for at in np.flatnonzero(~same):
            self._wrong(plan, group, layer, slots, int(at), found[at], wanted[at], same)

    @staticmethod
    def _rows(slots: Slots, layer: Layer) -> oracle.Words:
        return oracle.rows(slots.prefix, layer.key, layer.heads, layer.words.shape[3], layer.words.dtype)

    def _accepted(self, request: Request, drafts: Sequence[int]) -> list[int]:
        found = []
        for draft in [*drafts, -1]:
            token = oracle.token_after(request.last, self._vocab)
            found.append(token)
            request.extend([token])
            if token != draft:
                break
        return found

    def _reads(self, work: list[Work]) -> list[Slots]:
        found = []
        for group in self.groups:
            spans = []
            for number, each in enumerate(work):
                first, stop = self._held_span(group, each)
                if stop > first and (self._every_step or each.request.fresh):
                    spans.append((number, np.arange(first, stop), each.request.prefix[first:stop]))
            found.append(self._slots(group, work, spans))
        return found

    @staticmethod
    def _held_span(group: Group, work: Work) -> tuple[int, int]:
        """Return the first and the last token, of those that its request comes with, whose KV a step's work reads."""
        replayed, first = work.request.replayed, group.first_needed(work.start)
        if group.cached:
            return first, max(work.start, replayed.stop)
        return max(first, min(replayed.start, work.start)), work.start

    def _writes(self, work: list[Work]) -> list[Slots]:
        found = []
        for group in self.groups:
            spans = []
            for number, each in enumerate(work):
                request, end = each.request, each.start + each.count
                prefix = request.prefix[each.start : min(end, request.known)]
                if end > request.known:  # drafts
                    more = oracle.prefixes(each.drafts, start=request.known, before=request.last)
                    prefix = np.concatenate([prefix, more])
                if group.kind != "state":
                    first = each.start
                    if group.kind == "ring":
                        first = max(first, end - group.block_tokens)
                    elif group.cached and self.rewrites:  # what it computes is not what is there
                        with np.errstate(over="ignore"):
                            prefix = prefix + oracle.SALT * (np.arange(first, end) < request.replayed.stop)
                    elif group.cached:
                        first = min(max(first, request.replayed.stop), end)
                    spans.append((number, np.arange(first, end), prefix[first - each.start :]))
                    continue
                kept = group.checkpoint(each.start, end)
                for last in {kept - 1, end - 1} if kept else {end - 1}:
                    at = last - each.start
                    spans.append((number, np.arange(last, last + 1), prefix[at : at + 1]))
            slots = self._slots(group, work, spans)
            self._held[group.number][slots.blocks] = slots.prefix
            found.append(slots)
        return found

    def _slots(self, group: Group, work: list[Work], spans: list[tuple[int, Any, Any]]) -> Slots:
        if not spans:
            none = np.empty(0, dtype=np.int64)
            return Slots(none, none, none.astype(np.uint64), none, none, none.astype(np.bool_))
        blocks = []
        for number, positions, _ in spans:
            table = np.asarray(work[number].request.blocks[group.number], dtype=np.int64)
            blocks.append(table[positions * 0 if group.kind == "ring" else positions // group.block_tokens])
        position = np.concatenate([each for _, each, _ in spans])
        mine, own = group.shard.places(position)
        whose = np.repeat([number for number, _, _ in spans], [len(each) for _, each, _ in spans])
        return Slots(
            np.concatenate(blocks),
            position * 0 if group.kind == "state" else own % (group.block_tokens // group.shard.size),
            np.concatenate([each for _, _, each in spans]),
            whose,
            position,
            mine,
        )

    def _copied(self, work: list[Work]) -> Counter[str]:
        copied = Counter[str]()
        for group, held, size in zip(self.groups, self._held, self._bytes, strict=True):
            for each in work:
                request, computed = each.request, max(each.start, each.request.replayed.stop)
                if not request.fresh or not computed or not group.cached:
                    continue
                first, last = group.first_needed(computed) // group.block_tokens, (computed - 1) // group.block_tokens
                ends = np.minimum(np.arange(first + 1, last + 2) * group.block_tokens, computed) - 1
                ids = np.asarray(request.blocks[group.number][first : last + 1], dtype=np.int64)
                copied[request.name] += int((held[ids] != request.prefix[ends]).sum()) * size
                held[ids] = request.prefix[ends]
        return copied

    def _wrong(
        self, plan: Plan, group: Group, layer: Layer, slots: Slots, at: int, found: Any, wanted: Any, same: Any
    ) -> None:
        whose, token = int(slots.work[at]), int(slots.position[at])
        plan.bad.add(whose)
        request, block = plan.work[whose].request, token // group.block_tokens
        if (group.number, block) in request.reported:
            return
        request.reported.add((group.number, block))
        self.counters["wrong_blocks"] += 1
        if len(self.faults) >= FAULTS_KEPT:
            return
        block_id = int(slots.blocks[at])
        head = int(np.flatnonzero((found != wanted).any(axis=1))[0]) if block_id else 0
        inside = (slots.work == whose) & (slots.position // group.block_tokens == block)
        self.faults.append(
            Fault(
                step=self._step,
                rank=self._rank,
                request=request.name,
                group=group.number,
                block=block,
                block_id=block_id,
                layer=layer.name,
                head=layer.heads[head],
                token=token,
                wrong_tokens=int((inside & ~same).sum()),
                found=self._witness.found(found[head]) if block_id else "no block: the null block",
            )
        )
