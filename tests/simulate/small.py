"""A small simulated engine and node, whose times can be calculated by hand."""

from __future__ import annotations

from benchmarks.simulate.engine import EngineModel, full_attention
from benchmarks.simulate.events import NS
from benchmarks.simulate.link import MediumModel
from benchmarks.simulate.node import NodeModel
from benchmarks.simulate.run import Result, Scenario, simulate
from benchmarks.simulate.waiting import POLICIES
from benchmarks.simulate.workload import Load, fixed

MEGABYTE = 1_000_000
ENGINE = EngineModel(
    max_num_seqs=2,
    max_num_batched_tokens=1000,
    groups=full_attention(10),
    block_bytes=MEGABYTE,
    pool_blocks=1000,
    prefill_tokens_per_s=1000.0,
    step_s=0.01,
    sequence_s=0.001,
    copy_bytes_per_s=1e9,
    sync_load_max_bytes=1 << 30,
    idle_poll_s=0.001,
)
NODE = NodeModel(
    staging_blocks=100,
    chunk_blocks=2,
    fetch_threads=1,
    memory=MediumModel(bytes_per_s=100e6, latency_s=0.005),
    disk=MediumModel(bytes_per_s=10e6, latency_s=0.05),
    look_up_s=0.002,
    message_s=0.0001,
)
SMALL = Scenario("small", "exact", Load(), ENGINE, NODE)


def run(policy: str, requests: list[tuple[int, int, int]], arrivals: list[float], scenario: Scenario = SMALL) -> Result:
    """Run requests of (prompt tokens, blocks in the store, output tokens)."""
    return simulate(scenario, POLICIES[policy], requests=fixed(requests, arrivals, scenario.engine.block_tokens))


def ttft(result: Result) -> list[float]:
    return [each / NS for each in result.ttft_ns[0]]
