"""How fast copies must be on a GPU, measured beside the device's own copies in the same run (benchmarks/cuda.py)."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import cuda as bench

pytestmark = pytest.mark.gpu

LEAST = {"scatter": 0.85, "gather": 0.85} | dict.fromkeys(
    ("load from host", "load beside from host", "bounce pipeline"), 0.9
)

GAIN = 0.05  # of a step of matrix products with a load of all blocks before them


@pytest.fixture(scope="module", params=[(shape, blocks) for shape in bench.SHAPES for blocks in (64, 256)])
def measured(request: pytest.FixtureRequest) -> dict[str, Any]:
    result = bench.measure(*request.param)
    print(f"\n{datetime.date.today()} {torch.cuda.get_device_name(0)}\n{bench.report(result)}")
    return result


Record = Callable[[str, object], None]


@pytest.mark.parametrize("path", LEAST)
def test_a_path_reaches_its_share_of_the_devices_own_copy(
    measured: dict[str, Any], path: str, record_property: Record
) -> None:
    share = bench.shares(measured)[path]
    record_property(f"{path}, share of the device's own copy", f"{share:.2f}, at least {LEAST[path]}")
    assert share >= LEAST[path], bench.report(measured)


def test_one_block_costs_the_engine_at_most_15_us(measured: dict[str, Any], record_property: Record) -> None:
    submit = measured["launch_us"]["submit"]
    record_property("a load of one block, engine's thread", f"{submit:.1f} us, at most 15")
    assert submit <= 15


def test_device_slots_are_worth_their_room(measured: dict[str, Any], record_property: Record) -> None:
    """Or the copy kernel is to load from pinned host memory alone, without device slots (docs/BENCHMARKS.md)."""
    size = measured["blocks"] * measured["block_bytes"]
    host, device = (size / gbps / 1e6 for gbps in (measured["host_gbps"]["load"], measured["device_gbps"]["scatter"]))
    gain = (host - device) / (measured["forward_ms"]["alone"] + device)
    text = (
        f"{gain:.0%} of a step, at least {GAIN:.0%} (loads: {host:.2f} ms from the host, {device:.2f} from the device)"
    )
    record_property("what device slots spare", text)
    assert gain >= GAIN, bench.report(measured)
