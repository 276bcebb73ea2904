"""How fast copies must be on a GPU, measured beside the device's own copies in the same run (benchmarks/cuda.py)."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch

from benchmarks import cuda as bench

pytestmark = pytest.mark.gpu

LEAST = {"scatter": 0.85, "gather": 0.85} | dict.fromkeys(
    ("load from host", "load beside from host", "bounce pipeline"), 0.9
)


@pytest.fixture(scope="module", params=[(shape, blocks) for shape in bench.SHAPES for blocks in (64, 256)])
def measured(request: pytest.FixtureRequest) -> dict[str, Any]:
    result = bench.measure(*request.param)
    print(f"\n{datetime.date.today()} {torch.cuda.get_device_name(0)}\n{bench.report(result)}")
    return result


@pytest.mark.parametrize("path", LEAST)
def test_a_path_reaches_its_share_of_the_devices_own_copy(measured: dict[str, Any], path: str) -> None:
    assert bench.shares(measured)[path] >= LEAST[path], bench.report(measured)


def test_one_block_costs_the_engine_at_most_15_us(measured: dict[str, Any]) -> None:
    assert measured["launch_us"]["submit"] <= 15
