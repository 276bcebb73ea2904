"""Messages between scheduler side and workers: once at the start, and in every step (pickled, so small)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True)
class KVPrefetchNode(KVConnectorHandshakeMetadata):
    """The node of a process. `boot_id`: of the running kernel, "" where it cannot be read."""

    boot_id: str
    hostname: str


class AdapterRead(NamedTuple):
    """A rank has read a LoRA adapter. `content`: digests (adapter_reads.py), nothing where it was not understood."""

    number: int
    name: str
    path: str
    content: bytes


class LoadOrder(NamedTuple):
    """Copy staging slot slots[i] of `epoch` into paged block block_ids[i]. Both are arrays, which pickle as bytes.

    `adapter`: the number and the content of the LoRA adapter that computed them.
    """

    load_id: int
    request_id: str
    epoch: int
    asynchronous: bool
    block_ids: Sequence[int]
    slots: Sequence[int]
    adapter: tuple[int, bytes] | None = None


@dataclass(frozen=True)
class SaveOrder:
    """Copy paged block block_ids[i], once this step's forward wrote it, into staging slot slots[i] of `epoch`."""

    save_id: int
    epoch: int
    block_ids: list[int]
    slots: list[int]


class OfReset(NamedTuple):
    """The weights that a step is for: those since reset `number`.

    `agreed`: its loads and saves are of the weights whose digest the ranks reported for this reset.  `computes`: the
    step computes KV.
    """

    number: int = 0
    agreed: bool = False
    computes: bool = False


class RankWeights(NamedTuple):
    """A rank's weights in the first step of reset `number`. Without `digest`: they have changed since that step.

    `before`: the digest before, if anything updated the weights between the two.
    """

    number: int
    digest: bytes = b""
    before: bytes = b""


@dataclass
class KVPrefetchMetadata(KVConnectorMetadata):
    """One step's work. `live_epochs`: the epochs that load orders of this step or a later one may name.

    `overlap`: its synchronous loads may be copied while the step before it runs.
    """

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    live_epochs: tuple[int, ...] = ()
    weights: OfReset = field(default_factory=OfReset)
    overlap: bool = False


@dataclass
class KVPrefetchWorkerMeta(KVConnectorWorkerMetadata):
    """The number of ranks that finished each load and save; the loads and saves that failed on some rank.

    `weights`: of ranks that have something to say of theirs.  `adapters`: what each rank has read; no save is reported
    before the reads of its step.
    """

    loads: dict[int, int] = field(default_factory=dict)
    saves: dict[int, int] = field(default_factory=dict)
    failed_saves: set[int] = field(default_factory=set)
    failed_loads: set[int] = field(default_factory=set)
    weights: dict[int, RankWeights] = field(default_factory=dict)
    adapters: dict[int, list[AdapterRead]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVPrefetchWorkerMeta:
        """The sum over two ranks; neither argument is changed."""
        assert isinstance(other, KVPrefetchWorkerMeta)
        return KVPrefetchWorkerMeta(
            dict(Counter(self.loads) + Counter(other.loads)),
            dict(Counter(self.saves) + Counter(other.saves)),
            self.failed_saves | other.failed_saves,
            self.failed_loads | other.failed_loads,
            self.weights | other.weights,
            {
                rank: self.adapters.get(rank, []) + other.adapters.get(rank, [])
                for rank in self.adapters | other.adapters
            },
        )
