"""The comparison with a real run, without that run: its fit, its prediction, and its printed lines."""

from __future__ import annotations

import pytest

from benchmarks.simulate.real import Calibration, Measured, compared, fit_line, predict

CALIBRATION = Calibration(
    prefill_tokens_per_s=5000.0,
    step_s=0.006,
    sequence_s=0.0002,
    admit_s=0.004,
    message_s=0.0003,
    look_up_s=0.0008,
    call_latency_s=0.002,
    link_bytes_per_s=120e6,
    copy_bytes_per_s=2e9,
)


def test_latency_and_rate_come_from_fetches_of_two_sizes() -> None:
    rate, latency = fit_line([(1e6, 0.013), (1e6, 0.014), (1e6, 0.9), (3e6, 0.033), (3e6, 0.034), (3e6, 0.035)])
    assert (rate, latency) == pytest.approx((100e6, 0.004))


@pytest.mark.parametrize("arrivals", [None, [0.1 * index for index in range(20)]])
def test_a_prediction_serves_the_whole_load(arrivals: list[float] | None) -> None:
    result = predict(CALIBRATION, "adaptive", 20, arrivals, 16)
    assert result.finished == result.arrived == 20
    assert result.ttft_s(0.5) > 0.0


def test_a_closed_loop_has_so_many_requests_outstanding() -> None:
    """With one outstanding request at a time, the total is the sum of their times."""
    one, two = (predict(CALIBRATION, "local", count, None, 1) for count in (1, 2))
    assert two.end_ns == pytest.approx(2 * one.end_ns, rel=1e-6)


def test_predicted_and_measured_stand_side_by_side_with_their_ratio() -> None:
    result = predict(CALIBRATION, "wait", 8, None, 8)
    p50 = result.ttft_s(0.5)
    lines = compared("load", result, Measured([2 * p50, 2 * p50, 8 * p50], [1.0] * 3, [1.0] * 3, [0.5] * 3))
    assert next(line for line in lines if "p50" in line).split()[-1] == "0.50"
