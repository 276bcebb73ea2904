"""The scenarios: an 8B-class model on one GPU, a store behind a 100 Gbit/s link, and the difficulty of each."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.simulate.engine import EngineModel
from benchmarks.simulate.link import MediumModel
from benchmarks.simulate.node import NodeModel
from benchmarks.simulate.run import Result, Scenario, simulate
from benchmarks.simulate.waiting import POLICIES
from benchmarks.simulate.workload import Load
from kvprefetch.kv.groups import Group, Groups, Kind

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
# Half of the layers see 1,024 tokens. A block has the KV of one half, and a prefix of 64 blocks needs 64 and 16.
WINDOW = Groups((Group(Kind.FULL, 64), Group(Kind.WINDOW, 64, 1024)), 64)
WINDOW_ENGINE = replace(ENGINE, groups=WINDOW, block_bytes=2 << 20, pool_blocks=2 * 2304)
WINDOW_NODE = replace(NODE, staging_blocks=8192, chunk_blocks=16)
# A quarter of the layers is full attention, the others have states, in blocks of 512 tokens and 12 MiB.
STATES = Groups((Group(Kind.FULL, 512), *[Group(Kind.STATE, 512)] * 3), 512)
STATES_ENGINE = replace(ENGINE, groups=STATES, block_bytes=12 << 20, pool_blocks=32 * 16)
STATES_NODE = replace(NODE, staging_blocks=1365, chunk_blocks=3)

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
        Scenario("window", "full attention and a sliding window: all of a prefix or nothing",
                 replace(LOAD, rate_per_s=12, burst=50), WINDOW_ENGINE, WINDOW_NODE),
        Scenario("window-lost", "the same, and one found block in 1,000 gone when it is fetched",
                 replace(LOAD, rate_per_s=12, burst=50, lost_share=0.001), WINDOW_ENGINE, WINDOW_NODE),
        Scenario("states", "full attention and three groups of states, and one block in 1,000 gone",
                 replace(LOAD, rate_per_s=12, burst=50, own_blocks=(6, 8), lost_share=0.001), STATES_ENGINE,
                 STATES_NODE),
    )
}  # fmt: skip


def run_named(scenario: str, policy: str, requests: int, seed: int) -> Result:
    """Run a scenario and a policy by their names, which another process can get."""
    chosen = SCENARIOS[scenario]
    return simulate(replace(chosen, load=replace(chosen.load, requests=requests)), POLICIES[policy], seed=seed)
