"""The benchmark of the daemon's throughput runs, on a store that takes no time."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.daemon import Shape, run

SHAPE = Shape(ranks=2, value_bytes=64 << 10, blocks=16)
FEW = argparse.Namespace(chunk=1, fetch_threads=2, engines=[2], seconds=0.3)


@pytest.mark.parametrize("store", ["private", "cluster"])
def test_every_prompt_of_every_engine_is_fetched_and_counted(store: str) -> None:
    results = list(run(store, SHAPE, FEW))
    assert [each.engines for each in results] == [2]
    for each in results:
        assert each.keys_s == pytest.approx(32 * each.hints_s)
        assert each.gb_s == pytest.approx(each.hints_s * 32 * (64 << 10) / 1e9)
        assert each.hints_s > 0
        each.judge(memory_gb_s=10.0)
        assert each.used_up
