"""The workers of the harness: real worker-side connectors over paged CPU caches, a model, and a program per step.

Each rank runs its own queue of steps and may lag behind the others; only the forward needs all of them, as the model's
all-reduce does.  The order inside a step is vLLM's (kv_connector_model_runner_mixin.py): loads before the forward when
one of them is synchronous and after its launch otherwise, then saves, then what is reported to the scheduler.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvprefetch.connector.identity.updates import Updates
from kvprefetch.kv.groups import Groups, Kind
from tests.scheduler.model import LAYERS, PAGE_BYTES, Truth, sample, width


@dataclass
class Running:
    """A request as a model runner knows it: `computed` positions of `tokens` have their KV in `blocks`, per group.

    `states`: the number of the block that has the state after them, by group; else that of the last position.
    """

    tokens: list[int]
    blocks: list[list[int]]
    computed: int
    drafts: list[int] = field(default_factory=list)
    states: dict[int, int] = field(default_factory=dict)


@dataclass
class Step:
    """A scheduled step on its way through the ranks."""

    output: Any
    sampled: dict[str, list[int]] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    computed: bool = False
    reports: dict[int, KVConnectorOutput] = field(default_factory=dict)


class Rank:
    """One worker: its paged cache, which all groups share, as [layer][block][byte], its connector, its program."""

    def __init__(self, number: int, blocks: int, groups: Groups) -> None:
        self.number = number
        memory = torch.zeros(LAYERS, blocks, PAGE_BYTES, dtype=torch.uint8)
        self.kv, self.tensors = [], {}
        self.groups = groups.groups
        for index, group in enumerate(groups.groups):
            cache = memory.view(LAYERS, blocks, PAGE_BYTES // width(group), 1, width(group))
            self.kv.append(cache.numpy()[:, :, :, 0, :])
            # LBNHC: logically [block, head, position, byte].
            self.tensors.update({f"layer{index}.{i}": cache[i].permute(0, 2, 1, 3) for i in range(LAYERS)})
        self.connector: Any = None
        self.queue: deque[Step] = deque()
        self.program: Iterator[None] | None = None

    def read(self, group: int, layer: int, sequence: Running, first: int) -> bytes:
        """KV bytes of the positions from `first` to the next one to compute, or the state there."""
        stop, table = sequence.computed, sequence.blocks[group]
        if stop and self.groups[group].kind is Kind.STATE:
            held = _held(table, sequence.states.get(group, (stop - 1) // self.groups[group].block_tokens))
            state: bytes = self.kv[group][layer, held].tobytes()
            return state
        cache = self.kv[group][layer]
        _, tokens, size = cache.shape
        at = first // tokens
        data: bytes = cache[table[at : -(-stop // tokens)]].tobytes()
        return data[(first - at * tokens) * size : (stop - at * tokens) * size]

    def write(self, group: int, layer: int, sequence: Running, row: Sequence[bytes], drafts: int) -> None:
        """KV of the next positions, the last ones those of drafts.

        Of states only the one before the drafts is kept, in the block of the step's last position, and those of the
        drafts in the blocks behind that: vLLM's `align` mode.
        """
        size, start, table = self.groups[group].block_tokens, sequence.computed, sequence.blocks[group]
        cache = self.kv[group][layer]
        if self.groups[group].kind is Kind.STATE:
            for block, state in enumerate(row[len(row) - 1 - drafts :], (start + len(row) - 1) // size):
                cache[_held(table, block), 0] = bytearray(state)
            return
        for position, value in enumerate(row, start):
            cache[_held(table, position // size), position % size] = bytearray(value)

    def move_state(self, group: int, table: Sequence[int], source: int, target: int) -> None:
        self.kv[group][:, _held(table, target)] = self.kv[group][:, _held(table, source)]


class Workers:
    """All ranks of one engine. `report_before_save` is the order of model runner V1 with speculative decoding."""

    def __init__(self, ranks: int, blocks: int, truth: Truth, *, drafts: int, report_before_save: bool = False) -> None:
        self.ranks = [Rank(number, blocks, truth.groups) for number in range(ranks)]
        self.weights = 0
        self.sequences: dict[str, Running] = {}
        self.steps: deque[Step] = deque()
        self.drafts: dict[str, list[int]] = {}
        self._truth, self._draft_count = truth, drafts
        self._report_before_save = report_before_save

    def update_weights(self) -> None:
        self.weights += 1

    def watched(self) -> Updates:
        """What a rank sees of the weights."""

        class Model(torch.nn.Module):
            numbers = self

            def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
                return iter([("weights", torch.nn.Parameter(torch.tensor([float(self.numbers.weights)])))])

        updates = Updates(lambda: [Model()])
        updates.watch(self, ["update_weights"])
        return updates

    def execute(self, output: Any) -> None:
        """Queue a step; its work happens when ranks are moved."""
        step = Step(output)
        self.steps.append(step)
        for rank in self.ranks:
            rank.queue.append(step)

    def move(self, number: int) -> bool:
        """Let one rank go one stage further; False when it has nothing to do."""
        rank = self.ranks[number]
        if rank.program is None:
            if not rank.queue:
                return False
            rank.program = self._program(rank, rank.queue[0])
        before = rank.queue[0]
        try:
            next(rank.program)
        except StopIteration:
            rank.program = None
            assert rank.queue.popleft() is before
        return True

    def finish(self) -> tuple[Any, list[ModelRunnerOutput]]:
        """Run the oldest step to its end; its scheduler output and each rank's output."""
        step = self.steps.popleft()
        while len(step.reports) < len(self.ranks):
            for rank in range(len(self.ranks)):
                if rank not in step.reports:
                    self.move(rank)
        names = list(step.output.num_scheduled_tokens)
        index = {name: i for i, name in enumerate(names)}
        return step.output, [
            ModelRunnerOutput(
                names, index, [list(step.sampled[name]) for name in names], kv_connector_output=step.reports[rank]
            )
            for rank in range(len(self.ranks))
        ]

    def settle(self) -> None:
        """Execute all queued steps, as a collective call such as a weight update does."""
        while any(rank.queue for rank in self.ranks):
            for rank in range(len(self.ranks)):
                self.move(rank)

    # --- one step on one rank ---------------------------------------------------------------------------------------

    def _program(self, rank: Rank, step: Step) -> Iterator[None]:
        connector = rank.connector
        if connector is not None:
            connector.bind_connector_metadata(pickle.loads(pickle.dumps(step.output.kv_connector_metadata)))
        first = step.output.has_sync_kv_loads
        if first and connector is not None:
            connector.start_load_kv(None)
        step.arrived.add(rank.number)
        yield
        while not step.computed:
            if len(step.arrived) == len(self.ranks):
                self._forward(step)
            else:
                yield
        report = KVConnectorOutput()
        if connector is not None:
            if not first:
                connector.start_load_kv(None)
                yield
            if self._report_before_save:
                report = self._report(connector, step)
                connector.wait_for_save()
            else:
                connector.wait_for_save()
                yield
                report = self._report(connector, step)
            connector.clear_connector_metadata()
        step.reports[rank.number] = report

    def _report(self, connector: Any, step: Step) -> KVConnectorOutput:
        report = KVConnectorOutput()
        results = connector.get_transfer_results(step.output.finished_req_ids)
        report.finished_sending, report.finished_recving = results.finished_sending, results.finished_recving
        report.failed_recving = results.failed_recving
        report.invalid_block_ids = connector.get_block_ids_with_load_errors()
        report.kv_connector_stats = connector.get_kv_connector_stats()
        report.kv_connector_worker_meta = connector.build_connector_worker_meta()
        return report

    # --- the model runner -------------------------------------------------------------------------------------------

    def _forward(self, step: Step) -> None:
        self._update(step.output)
        for name, count in step.output.num_scheduled_tokens.items():
            drafts = step.output.scheduled_spec_decode_tokens.get(name)
            step.sampled[name] = self._run(self.sequences[name], count, drafts)
        self.drafts = {name: self.sequences[name].drafts for name in step.output.num_scheduled_tokens}
        step.computed = True

    def _update(self, output: Any) -> None:
        """A model runner's work with a scheduler output, in both runners' forms."""
        for name in output.finished_req_ids:
            self.sequences.pop(name, None)
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids if new.prefill_token_ids is not None else new.prompt_token_ids
            self.sequences[new.req_id] = Running(list(tokens), _copied(new.block_ids), new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            computed = cached.num_computed_tokens[i]
            blocks = cached.new_block_ids[i]
            if name in cached.resumed_req_ids:
                self.sequences[name] = Running(list(cached.all_token_ids[name]), _copied(blocks), computed)
                continue
            sequence = self.sequences[name]
            if blocks is not None:
                for table, more in zip(sequence.blocks, blocks, strict=True):
                    table += more
            # Less than we have: a failed load is computed again. More: drafts counted that were rejected since.
            sequence.computed = min(sequence.computed, computed)

    def _run(self, sequence: Running, count: int, drafts: list[int] | None) -> list[int]:
        """Compute `count` positions, the last of them drafts; the tokens sampled, none inside a prompt."""
        known = count - len(drafts or ())
        start, stop = sequence.computed, sequence.computed + known
        assert stop <= len(sequence.tokens), "the scheduler counts on tokens that do not exist"
        tail: list[int] = []
        if drafts:
            # Under async scheduling the scheduler has only placeholders: the drafts are here.
            tail = [
                sequence.drafts[i] if token == -1 and i < len(sequence.drafts) else token
                for i, token in enumerate(drafts)
            ]
        newest = self._compute(sequence, sequence.tokens[start:stop] + tail, len(tail))
        end = start + known + len(tail)
        if stop < len(sequence.tokens):
            self._accept(sequence, stop, end, 0)
            sequence.drafts = []
            return []
        sampled = [newest(known - 1)]
        for i, token in enumerate(tail):
            if token != sampled[-1]:
                break
            sampled.append(newest(known + i))
        self._accept(sequence, stop, end, len(sampled) - 1)
        sequence.tokens += sampled
        sequence.drafts = self._propose(sequence.tokens)
        return sampled

    def _compute(self, sequence: Running, tokens: Sequence[int], drafts: int) -> Callable[[int], int]:
        """Write the KV of `tokens`, the last ones drafts; the function samples after the i-th of them."""
        rows: list[list[bytes]] = []
        for rank in self.ranks:
            found = self._truth.forward(
                self.weights,
                rank.number,
                sequence.computed,
                tokens,
                lambda group, layer, first, rank=rank: rank.read(group, layer, sequence, first),
            )
            for at, row in enumerate(found):
                rank.write(*divmod(at, LAYERS), sequence, row, drafts)
            rows += found
        return lambda i: sample([row[i] for row in rows])

    def _accept(self, sequence: Running, stop: int, end: int, drafts: int) -> None:
        """The step computed all before `end`, of which drafts from `stop` on, and so many of these are right.

        As vLLM's postprocess_mamba: the state at the end of the last full block goes into that block.
        """
        sequence.computed = stop + drafts
        for number, group in enumerate(self._truth.groups.groups):
            if group.kind is not Kind.STATE:
                continue
            size = group.block_tokens
            first, full = (end - 1) // size, sequence.computed // size
            sequence.states[number] = first + drafts
            if full * size < stop:
                continue
            for rank in self.ranks:
                rank.move_state(number, sequence.blocks[number], first + full * size - stop, full - 1)
            if full - 1 == first:
                sequence.states[number] = first

    def _propose(self, tokens: list[int]) -> list[int]:
        """Drafts of which some are right, by what the tokens are."""
        drafts: list[int] = []
        for _ in range(self._draft_count):
            right = self._truth.next_token(self.weights, tokens + drafts)
            drafts.append(right if (len(tokens) + right) % 3 else (right + 1) % 50)
        return drafts


def _held(table: Sequence[int], number: int) -> int:
    """The block of this number in a request's table."""
    assert table[number] != 0, "the scheduler gave no block for a position to compute"
    return table[number]


def _copied(tables: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(table) for table in tables]
