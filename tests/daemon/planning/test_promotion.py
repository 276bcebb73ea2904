"""Promotion: urgent requests get the device slots, and a claim, reset, failure or end loses none of them."""

from __future__ import annotations

import pytest

from kvprefetch.daemon.planning.requests import Request
from tests.daemon.planning.promoting import HOST, Device, request_of


def test_a_published_request_is_copied_and_then_named() -> None:
    device = Device(4)
    request = device.show(1, [7, 8, 9], host=5)
    order = device.order()
    assert order is not None
    assert order.slots == [(5, HOST), (6, HOST + 1), (7, HOST + 2)]
    assert device.entries(request) == [5, 6, 7]
    device.copy()
    assert device.entries(request) == [HOST, HOST + 1, HOST + 2]
    assert device.order() is None
    device.drop(request.key)
    assert device.free_and_idle() == (1, 3)


def test_blocks_that_are_on_the_device_are_named_at_once() -> None:
    device = Device(4)
    first = device.show(1, [7, 8])
    device.promote()
    device.drop(first.key)
    second = device.show(2, [7, 8, 9], host=2)
    assert device.entries(second) == [HOST, HOST + 1, 4]


def test_room_goes_by_urgency_and_is_taken_from_the_least_urgent() -> None:
    device = Device(4, chunk=2)
    second, third = device.show(2, [20, 21, 22, 23]), device.show(3, [30, 31, 32, 33])
    device.promote()
    assert device.on_device(second, third) == [4, 0]
    first = device.show(1, [10, 11, 12, 13], host=8)
    device.promote()
    assert device.on_device(first, second, third) == [4, 0, 0]
    third.asked = True
    device.promotions.asked(third.key)
    device.promote()
    assert device.on_device(first, second, third) == [0, 0, 4]


def test_a_copy_that_comes_after_the_claim_is_kept_for_others() -> None:
    device = Device(2)
    request = device.show(1, [1, 2])
    assert device.order() is not None
    device.tables.claim(request.key)
    device.copy()
    assert device.entries(request) == [0, 1]
    assert device.promotions.named(request.key) == 0
    assert device.free_and_idle() == (0, 2)


def full() -> tuple[Device, Request, Request]:
    """Return a device that a late request fills, that request, and an early one without room yet."""
    device = Device(2)
    late = device.show(2, [1, 2])
    device.promote()
    return device, late, device.show(1, [3, 4], host=2)


def test_a_claimed_request_keeps_the_slots_that_it_may_have_read() -> None:
    device, late, early = full()
    device.tables.claim_next = late.key
    device.promote()
    assert device.tables.claims[late.key] == [HOST, HOST + 1]
    assert device.on_device(early) == [0]
    assert device.entries(late) == [0, 1]
    device.drop(late.key)
    device.promote()
    assert device.on_device(early) == [2]


def test_copies_are_taken_once_their_claim_is_given_up() -> None:
    device, late, early = full()
    device.tables.claim(late.key)
    device.promote()
    assert device.on_device(late, early) == [2, 0]
    device.tables.claims[late.key] = None
    device.tick()
    device.promote()
    assert device.on_device(late, early) == [0, 2]


def test_blocks_moved_back_just_before_a_claim_are_named_again_after_it() -> None:
    device, late, early = full()
    device.tables.claim_next = late.key
    device.promote()
    device.tables.claims[late.key] = None
    device.drop(early.key)
    device.tick()
    assert device.on_device(late) == [2]


def test_a_request_that_gave_its_claim_up_is_promoted_after_all() -> None:
    """The scheduler takes back an answer that it finds no room for; until then every pass claims anew."""
    device = Device(4, chunk=2)
    request = device.show(1, [1, 2, 3, 4])
    device.order()
    device.tables.claim(request.key)
    device.copy()
    assert device.order() is None
    device.tick()
    assert device.order() is None
    device.tables.claims[request.key] = None
    device.tick()
    device.promote()
    assert sorted(device.entries(request)) == [HOST, HOST + 1, HOST + 2, HOST + 3]
    device.drop(request.key)
    device.tick()
    assert device.free_and_idle() == (0, 4)


def test_a_copy_that_lost_its_requests_is_void() -> None:
    """No request pinned its host slot any more during the copy."""
    device = Device(2)
    first = device.show(1, [1])
    assert device.order() is not None
    device.drop(first.key)
    device.host[0] = 99
    device.copy()
    second = device.show(2, [1], host=1)
    assert device.entries(second) == [1]
    device.promote()
    assert device.slots[device.entries(second)[0]] == 1


def test_after_a_reset_old_copies_are_not_found_nor_made() -> None:
    device = Device(4)
    old = request_of(1, [1, 2])
    device.publish(old, 0, [0], [1])
    device.promote()
    device.tables.claim(old.key)
    device.promotions.reset()
    device.publish(old, 1, [1], [2])
    device.tables.claims[old.key] = None
    device.promotions.asked(old.key)
    assert device.order() is None
    assert device.entries(device.show(2, [1, 2], host=2)) == [2, 3]


def test_a_failing_device_is_given_up_and_all_requests_move_back_to_the_host() -> None:
    device = Device(4, chunk=1)
    request = device.show(1, [1, 2, 3])
    device.order()
    device.copy()
    device.order()
    device.copy(ok=False)
    assert device.on_device(request) == [1]
    device.close()
    assert device.entries(request) == [0, 1, 2]
    device.show(2, [1], host=3)
    assert device.order() is None
    device.drop(request.key)
    assert device.free_and_idle() == (4, 0)


def test_a_request_taken_back_and_published_again_names_its_new_slots() -> None:
    """In other host slots, with the copy of one block under way and that of another complete."""
    device = Device(4, chunk=1)
    request = device.show(1, [5, 6])
    device.order()
    device.copy()
    device.order()
    device.promotions.dropped(request.key)
    device.entries(request).clear()
    device.host[1] = -2
    device.copy()
    device.publish(request, 0, [2, 3], [5, 6])
    assert device.entries(request) == [HOST, 3], "the copy that lost its request is void"
    device.promote()
    [_, again] = device.entries(request)
    assert again >= HOST
    assert device.slots[again] == 6
    device.drop(request.key)
    assert device.free_and_idle() == (2, 2)


def test_a_digest_that_a_hint_has_twice_is_copied_once() -> None:
    device = Device(4)
    request, again = request_of(1, [5, 5, 5]), request_of(2, [5, 5])
    device.publish(request, 0, [0, 0, 0], [5, 5, 5])
    device.promote()
    assert device.entries(request) == [HOST, 0, 0]
    device.publish(again, 0, [3, 3], [5, 5])
    assert device.entries(again) == [HOST, 3], "only one entry would move back"
    device.drop(again.key)
    device.drop(request.key)
    assert device.free_and_idle() == (3, 1)


@pytest.mark.parametrize("waiting", [100, 1600])
def test_the_cost_of_a_publication_does_not_depend_on_the_queue(waiting: int) -> None:
    """Counted in looks at flags, with a full device."""
    device = Device(4)
    for number in range(1, waiting):
        device.show(number, [number * 10 + i for i in range(4)])
        device.promote()
    assert device.tables.looks < 4 * waiting
