"""One simulated run: a load, an engine, a node and a policy put together, and their result."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.simulate.client import Client, ClientCounters
from benchmarks.simulate.engine import Engine, EngineModel
from benchmarks.simulate.events import NS, Loop
from benchmarks.simulate.node import Node, NodeCounters, NodeModel
from benchmarks.simulate.waiting import Policy
from benchmarks.simulate.workload import Load, SimRequest, StoreContents, generate
from tests.lab.passes import percentile


@dataclass(frozen=True, slots=True)
class Scenario:
    """The simulated parts; `shows` is the question that they answer."""

    name: str
    shows: str
    load: Load
    engine: EngineModel
    node: NodeModel


@dataclass(slots=True)
class Result:
    """One policy's run of one scenario. `ttft_ns`: times to first token by priority."""

    scenario: str
    policy: str
    block_bytes: int
    ttft_ns: dict[int, array[int]] = field(default_factory=dict)
    arrived: int = 0
    finished: int = 0
    aborted: int = 0
    staged_unloaded: int = 0
    end_ns: int = 0
    node: NodeCounters = field(default_factory=NodeCounters)
    client: ClientCounters = field(default_factory=ClientCounters)
    gauges: dict[str, int] = field(default_factory=dict)
    events: int = 0
    cpu_s: float = 0.0

    def ttft_s(self, fraction: float, priority: int | None = None) -> float:
        """Return a percentile of the time to first token, of one priority or all; NaN without any."""
        values = [each for key, part in self.ttft_ns.items() if priority in (None, key) for each in part]
        return percentile([float(each) for each in values], fraction) / NS if values else float("nan")

    @property
    def mean_ttft_s(self) -> float:
        """The mean time to first token; NaN without any."""
        count = sum(map(len, self.ttft_ns.values()))
        return sum(map(sum, self.ttft_ns.values())) / count / NS if count else float("nan")

    @property
    def hidden_fraction(self) -> float:
        """The mean over requests that loaded something, as the daemon reports it per request; NaN without any."""
        return self.client.hidden_sum / self.client.loads if self.client.loads else float("nan")

    @property
    def wasted_share(self) -> float:
        """The share of fetched bytes that no request loaded before their room was reused."""
        return self.node.wasted / self.node.fetched if self.node.fetched else 0.0


def simulate(
    scenario: Scenario,
    policy: Policy,
    *,
    seed: int = 0,
    requests: list[SimRequest] | None = None,
    outstanding: int | None = None,
) -> Result:
    """Run to the end. `requests` replaces the generated load; `outstanding` makes a closed loop of so many requests."""
    begun = time.process_time()
    groups, block_tokens = scenario.engine.groups, scenario.engine.block_tokens
    sizes = {group.block_tokens for group in groups.groups}
    if len(sizes) > 1 or (scenario.load.shared_blocks and not groups.partial):
        raise ValueError(
            "several KV groups are modelled for prompts that share nothing, with blocks of one size: "
            f"shared_blocks={scenario.load.shared_blocks} block_tokens={sorted(sizes)}"
        )
    loop = Loop()
    contents = StoreContents(seed, scenario.load.lost_share)
    result = Result(scenario.name, policy.name, scenario.engine.block_bytes)
    source: Iterator[SimRequest] = (
        iter(requests) if requests is not None else generate(scenario.load, block_tokens, contents, seed)
    )
    coming: SimRequest | None = None

    def ended(request: SimRequest) -> None:
        result.end_ns = loop.now_ns
        if request.outcome == "finished":
            result.finished += 1
        else:
            result.aborted += 1
        if request.first_token_ns:
            part = result.ttft_ns.setdefault(request.priority, array("q"))
            part.append(request.first_token_ns - request.arrival_ns)
        if outstanding is not None:
            loop.after(0, arrive)

    def expect() -> None:
        nonlocal coming
        coming = next(source, None)
        if coming is not None:
            loop.at(coming.arrival_ns, arrive)

    def arrive() -> None:
        nonlocal coming
        request = coming if outstanding is None else next(source, None)
        if request is None:
            return
        request.arrival_ns = loop.now_ns
        result.arrived += 1
        if outstanding is None:
            expect()
        engine.add(request)

    engine = Engine(loop, scenario.engine, roomy=policy.local, ended=ended)

    def changed(key: tuple[int, int]) -> None:
        if key in client.hinted:
            engine.changed(client.hinted[key])

    node = Node(loop, scenario.node, contents, scenario.engine.block_bytes, changed, groups)
    client = engine.client = Client(loop, policy, node, block_tokens, engine.review)
    if outstanding is None:
        expect()
    else:
        for _ in range(outstanding):
            loop.at(1, arrive)
    loop.run()
    result.node, result.client = node.counters, client.counters
    result.staged_unloaded, result.gauges = node.staged_unloaded, node.gauges()
    result.events = loop.count
    result.cpu_s = time.process_time() - begun
    return result
