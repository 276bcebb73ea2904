"""The scenarios: an 8B-class model on one GPU, a store behind a 100 Gbit/s link, and the difficulty of each."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.simulate.engine import EngineModel
from benchmarks.simulate.link import MediumModel
from benchmarks.simulate.node import NodeModel
from benchmarks.simulate.run import Result, Scenario, simulate
from benchmarks.simulate.waiting import POLICIES
from benchmarks.simulate.workload import Load

ENGINE = EngineModel(pool_blocks=2304)  # what its 32 slots need, so that load means a full pool
NODE = NodeModel(
    staging_blocks=4096,  # 16 GiB
    chunk_blocks=8,
    fetch_threads=4,
    disk_threads=2,
    memory=MediumModel(bytes_per_s=10e9, latency_s=0.0003, call_bytes_per_s=5e9),
    disk=MediumModel(bytes_per_s=1.5e9, latency_s=0.003, call_bytes_per_s=0.8e9),
)
LOAD = Load(rate_per_s=16.0)
# The upper two levels of the tree hold 90 % of a prompt's blocks; the KV pool is too small to keep them all.
TREE = replace(LOAD, shared_blocks=(16, 38), fan_out=(8, 40), own_blocks=(4, 8))
SMALL_STAGING = replace(NODE, staging_blocks=160)  # two requests of 64 blocks and a half
SLOW = MediumModel(bytes_per_s=1.2e9, latency_s=0.001)

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("poisson", "steady load at about four fifths of what the engine can serve", LOAD, ENGINE, NODE),
        Scenario("bursty", "bursts of 200: the queue is long, and the link has to keep up",
                 replace(LOAD, burst=200), ENGINE, NODE),
        Scenario("shared", "prefix tree, 90 % of every prompt shared, in bursts",
                 replace(TREE, burst=200), ENGINE, NODE),
        Scenario("aborts", "bursts, and 40 % of the requests aborted after 3 s on average",
                 replace(LOAD, burst=200, abort_share=0.4, abort_after_s=3.0), ENGINE, NODE),
        Scenario("tiers", "half of the store's values on a slow disk",
                 replace(LOAD, burst=50, rate_per_s=8, disk_share=0.5), ENGINE, NODE),
        Scenario("priorities", "bursts, one request in ten is urgent",
                 replace(LOAD, burst=200, urgent_share=0.1), ENGINE, NODE),
        Scenario("small-staging", "bursts of 200 and staging for two requests",
                 replace(LOAD, burst=200), ENGINE, SMALL_STAGING),
        Scenario("freeze", "a store that does nothing for 5 s in every 100 s", LOAD, ENGINE,
                 replace(NODE, freezes_s=tuple((50.0 + 100.0 * i, 5.0) for i in range(67)))),
        Scenario("misses", "nothing in the store: what does asking cost?",
                 replace(LOAD, rate_per_s=4, miss_share=1.0), ENGINE, NODE),
        Scenario("half-missing", "half of the prompts unknown, and one found block in 500 gone when it is fetched",
                 replace(LOAD, rate_per_s=6, burst=20, miss_share=0.5, lost_share=0.002), ENGINE, NODE),
        Scenario("slow-link", "a link slower than recomputing",
                 replace(LOAD, rate_per_s=4), ENGINE, replace(NODE, memory=SLOW)),
    )
}  # fmt: skip


def run_named(scenario: str, policy: str, requests: int, seed: int) -> Result:
    """Run a scenario and a policy by their names, which another process can get."""
    chosen = SCENARIOS[scenario]
    return simulate(replace(chosen, load=replace(chosen.load, requests=requests)), POLICIES[policy], seed=seed)
