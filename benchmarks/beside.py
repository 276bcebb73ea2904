"""Measures loads beside saves over a limited link: time of a load, and what each gets of the link. Needs root.

A real daemon and a real cluster; the engine is played, so that nothing but the daemon decides. Phases alternate: loads
alone, loads beside saves, saves alone. "Gapless" loads: the next one waits already when one ends.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

from tests.daemon.traffic import Figures, Traffic
from tests.lab.daemon import Daemon
from tests.lab.interference import Interference
from tests.lab.link import LimitedLink, available
from tests.lab.passes import percentile
from tests.lab.process import exit_on_sigterm
from tests.lab.store import Store

# Name, loads outstanding, saves.
PHASES = (
    ("loads, one at a time", 1, False),
    ("the same beside saves", 1, True),
    ("loads, gapless", 2, False),
    ("the same beside saves", 2, True),
    ("saves alone", 0, True),
)
LOAD_BYTES = 3 << 20
STAGING_BYTES = 64 << 20


def measure(rate_mbit: float, block_kib: int, rounds: int, seconds: float, say: Callable[[str], None]) -> None:
    block_bytes = block_kib << 10
    blocks = max(1, LOAD_BYTES // block_bytes) if block_bytes <= LOAD_BYTES else 2
    prompts = 2 * STAGING_BYTES // (blocks * block_bytes)
    found: list[list[Figures]] = [[] for _ in PHASES]
    with LimitedLink(rate_mbit=rate_mbit) as link, Store(memory="3 GB", link=link) as store:
        options = {"mooncake_config": store.config, "env": {"MC_TCP_BIND_ADDRESS": link.host_ip}}
        with Daemon(staging=f"{STAGING_BYTES}", **options) as daemon:  # type: ignore[arg-type]
            traffic = Traffic(daemon, block_bytes=block_bytes, blocks=blocks, prompts=prompts)
            others = Interference()
            for number in range(rounds + 1):
                for (_, outstanding, saving), figures in zip(PHASES, found, strict=True):
                    result = traffic.run(seconds, outstanding=outstanding, saving=saving)
                    if number:  # the first round warms up
                        figures.append(result)
            cores = others.cores()
    say(f"{rate_mbit:g} Mbit/s, loads of {blocks} blocks of {block_kib} KiB; others used {cores:.1f} cores")
    for (name, _, _), figures in zip(PHASES, found, strict=True):
        times = [1e3 * each for result in figures for each in result.load_s]
        p50, p99 = (percentile(times, at) if times else 0.0 for at in (0.5, 0.99))
        loads, saves = (
            statistics.median(getattr(each, rate) for each in figures) / 1e6 for rate in ("load_rate", "save_rate")
        )
        missed = sum(each.missed for each in figures)
        say(
            f"  {name:24} load p50 {p50:6.1f} p99 {p99:6.1f} ms ({len(times)}, {missed} missed)  "
            f"loads {loads:6.1f}  saves {saves:6.1f} MB/s"
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside", description=__doc__)
    parser.add_argument("--rate", type=float, nargs="+", default=[1000.0, 4000.0], metavar="MBIT", help="of the link")
    parser.add_argument("--block", type=int, nargs="+", default=[64, 5120], metavar="KIB", help="size of a block")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds after the warm-up (default 3)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each phase (default 3)")
    options = parser.parse_args(argv)
    if why := available():
        parser.error(f"no limited link here: {why}")
    exit_on_sigterm()
    for rate in options.rate:
        for block in options.block:
            measure(rate, block, options.rounds, options.seconds, lambda line: print(line, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
