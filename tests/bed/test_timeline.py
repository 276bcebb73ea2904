"""The modelled device: when steps and copies begin and end, what counts as late, and proportions of the presets."""

import pytest

from tests.lab.bed.timeline import GRID, MACHINES, PRESETS, Preset, Timeline

MS = 1_000_000
PLAIN = Preset("plain", 50, 10, 100, 8192, 8.0, 10.0, "a test's")


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1_000 * MS

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def device(clock: Clock) -> Timeline:
    return Timeline(PLAIN, clock)


def test_a_step_takes_its_base_and_its_tokens(device: Timeline, clock: Clock) -> None:
    assert device.launch(2000, 10) - clock.now_ns == (50 + 20 + 1) * MS


def test_a_step_that_is_launched_ahead_begins_when_the_one_before_it_ends(device: Timeline, clock: Clock) -> None:
    first = device.launch(100, 0)
    clock.now_ns += 10 * MS
    assert device.launch(0, 10) - first == 51 * MS
    assert (device.steps, device.late_launches, device.idle_ns) == (2, 0, 0)


def test_it_knows_the_first_step_of_a_request(device: Timeline, clock: Clock) -> None:
    begun = [clock.now_ns, device.launch(100, 0)]
    device.admit("a")
    device.launch(100, 0)
    assert (device.report()["admitted"], device.report()["begun_ns"]) == ({"a": 1}, begun)


def test_a_step_that_comes_late_leaves_the_device_idle(device: Timeline, clock: Clock) -> None:
    clock.now_ns = device.launch(100, 0) + 3 * MS
    assert device.launch(0, 10) - clock.now_ns == 51 * MS
    assert (device.late_launches, device.idle_ns) == (1, 3 * MS)


def test_a_device_without_requests_does_not_wait_for_one(device: Timeline, clock: Clock) -> None:
    clock.now_ns = device.launch(100, 0) + 300 * MS
    device.launch(100, 0)
    assert (device.late_launches, device.idle_ns) == (0, 0)


def test_the_next_part_of_a_prompt_can_be_late(device: Timeline, clock: Clock) -> None:
    clock.now_ns = device.launch(100, 0) + 3 * MS
    device.launch(100, 0, goes_on=True)
    assert (device.late_launches, device.idle_ns) == (1, 3 * MS)


def test_a_synchronous_copy_lengthens_its_step(device: Timeline, clock: Clock) -> None:
    assert device.launch(0, 10, copy_bytes=20_000_000) - clock.now_ns == (2 + 51) * MS
    assert device.copy_ns == 2 * MS


def test_a_synchronous_copy_that_overlaps_lengthens_its_step_by_what_is_left(device: Timeline, clock: Clock) -> None:
    assert device.launch(0, 10, copy_bytes=20_000_000, beside_ns=clock.now_ns) - clock.now_ns == (2 + 51) * MS
    assert device.launch(0, 10, copy_bytes=20_000_000, beside_ns=clock.now_ns) - clock.now_ns == (2 + 51 + 51) * MS
    clock.now_ns += 103 * MS
    assert device.launch(0, 10, copy_bytes=20_000_000, beside_ns=clock.now_ns) - clock.now_ns == (1 + 1 + 51) * MS
    assert device.copy_ns == 3 * MS
    assert (
        device.launch(0, 10, copy_bytes=20_000_000, beside_ns=clock.now_ns - MS) - clock.now_ns == (1 + 1 + 2 * 51) * MS
    )


def test_an_asynchronous_copy_runs_beside_the_steps_and_behind_other_copies(device: Timeline, clock: Clock) -> None:
    device.launch(0, 10)
    assert device.copy(20_000_000) - clock.now_ns == 2 * MS
    assert device.copy(20_000_000) - clock.now_ns == 4 * MS
    assert device.launch(0, 10) - clock.now_ns == 102 * MS


def test_it_goes_on_with_another_preset_behind_what_runs(device: Timeline, clock: Clock) -> None:
    running = device.launch(0, 10)
    device.restart(PRESETS["10-35"])
    assert device.launch(1000, 0) - running == 45 * MS
    assert (device.steps, device.late_launches) == (1, 0)


@pytest.mark.parametrize("preset", [*MACHINES, *GRID], ids=lambda each: each.name)
def test_a_smaller_token_keeps_the_proportions(preset: Preset) -> None:
    small = preset.sized(2048)
    assert small.proportions(2000) == preset.proportions(2000)
    assert small.copy_ns(2000 * 2048) == pytest.approx(preset.copy_ns(2000 * preset.kv_bytes_per_token), abs=1)
    assert small.step_ns(2000, 16) == preset.step_ns(2000, 16)
    assert len(preset.source) > 30


def test_a_link_can_be_chosen_by_the_time_of_a_fetch() -> None:
    preset = PRESETS["25-35"].fetching(2000, 12.5)
    assert preset.fetch_ms(2000) == pytest.approx(12.5)
    assert preset.proportions(2000) == "fetch : prefill : step = 12.5 : 70 : 25 ms"
