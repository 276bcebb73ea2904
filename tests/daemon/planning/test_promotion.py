"""Promotion: the urgent get the device slots, and what is claimed, reset, failed or given up costs none of them."""

from __future__ import annotations

import pytest

from tests.daemon.planning.promoting import HOST, Device, request_of


def test_a_published_request_is_copied_and_then_named() -> None:
    device = Device(4)
    request = request_of(1, [7, 8, 9])
    device.publish(request, 0, [5, 6, 7], [7, 8, 9])
    order = device.order()
    assert order is not None
    assert order.slots == [(5, HOST), (6, HOST + 1), (7, HOST + 2)]
    assert device.tables.entries[request.key] == [5, 6, 7]
    device.copy()
    assert device.tables.entries[request.key] == [HOST, HOST + 1, HOST + 2]
    assert device.order() is None
    device.drop(request.key)
    gauges = device.promotions.gauges()
    assert (gauges["device_slots_free"], gauges["device_slots_idle"]) == (1, 3)


def test_what_is_on_the_device_already_is_named_at_once() -> None:
    device = Device(4)
    first, second = request_of(1, [7, 8]), request_of(2, [7, 8, 9])
    device.publish(first, 0, [0, 1], [7, 8])
    device.promote()
    device.drop(first.key)
    device.publish(second, 0, [2, 3, 4], [7, 8, 9])
    assert device.tables.entries[second.key] == [HOST, HOST + 1, 4]


def test_room_goes_by_urgency_and_is_taken_from_the_least_urgent() -> None:
    device = Device(4, chunk=2)
    requests = [request_of(number, [10 * number + i for i in range(4)]) for number in (1, 2, 3)]
    for request in requests[1:]:
        device.publish(request, 0, list(range(4)), [10 * request.sequence + i for i in range(4)])
        device.promote()
    assert [device.on_device(request) for request in requests[1:]] == [4, 0]
    device.publish(requests[0], 0, [8, 9, 10, 11], [10, 11, 12, 13])
    device.promote()
    assert [device.on_device(request) for request in requests] == [4, 0, 0]
    requests[2].asked = True
    device.promotions.asked(requests[2].key)
    device.promote()
    assert [device.on_device(request) for request in requests] == [0, 0, 4]


def test_a_copy_that_comes_after_the_claim_is_kept_for_others() -> None:
    device = Device(2)
    request = request_of(1, [1, 2])
    device.publish(request, 0, [0, 1], [1, 2])
    assert device.order() is not None
    device.tables.claim(request.key)
    device.copy()
    assert device.tables.entries[request.key] == [0, 1]
    assert device.promotions.named(request.key) == 0
    gauges = device.promotions.gauges()
    assert (gauges["device_slots_free"], gauges["device_slots_idle"]) == (0, 2)


def test_a_claimed_request_keeps_what_it_may_have_read() -> None:
    device = Device(2)
    late, early = request_of(2, [1, 2]), request_of(1, [3, 4])
    device.publish(late, 0, [0, 1], [1, 2])
    device.promote()
    device.publish(early, 0, [2, 3], [3, 4])
    device.tables.claim_next = late.key
    device.promote()
    assert device.tables.claims[late.key] == [HOST, HOST + 1]
    assert device.on_device(early) == 0
    assert device.tables.entries[late.key] == [0, 1]
    device.drop(late.key)
    device.promote()
    assert device.on_device(early) == 2


def test_copies_are_taken_once_the_claim_that_protected_them_is_given_up() -> None:
    device = Device(2)
    late, early = request_of(2, [1, 2]), request_of(1, [3, 4])
    device.publish(late, 0, [0, 1], [1, 2])
    device.promote()
    device.tables.claim(late.key)
    device.publish(early, 0, [2, 3], [3, 4])
    device.promote()
    assert [device.on_device(request) for request in (late, early)] == [2, 0]
    device.tables.claims[late.key] = None
    device.tick()
    device.promote()
    assert [device.on_device(request) for request in (late, early)] == [0, 2]


def test_a_request_that_gave_its_claim_up_is_promoted_after_all() -> None:
    """An answer that the scheduler finds no room for is taken back; until then every pass claims anew."""
    device = Device(4, chunk=2)
    request = request_of(1, [1, 2, 3, 4])
    device.publish(request, 0, [0, 1, 2, 3], [1, 2, 3, 4])
    device.order()
    device.tables.claim(request.key)
    device.copy()
    assert device.order() is None
    device.tick()
    assert device.order() is None
    device.tables.claims[request.key] = None
    device.tick()
    device.promote()
    assert sorted(device.tables.entries[request.key]) == [HOST, HOST + 1, HOST + 2, HOST + 3]
    device.drop(request.key)
    device.tick()
    assert device.promotions.gauges()["device_slots_idle"] == 4


def test_what_was_sent_back_just_before_a_claim_is_named_again_when_that_is_given_up() -> None:
    device = Device(2)
    late, early = request_of(2, [1, 2]), request_of(1, [3, 4])
    device.publish(late, 0, [0, 1], [1, 2])
    device.promote()
    device.publish(early, 0, [2, 3], [3, 4])
    device.tables.claim_next = late.key
    device.promote()
    device.tables.claims[late.key] = None
    device.drop(early.key)
    device.tick()
    assert device.on_device(late) == 2


def test_a_copy_whose_requests_are_gone_is_void() -> None:
    """Nothing pinned its host slot any more while it was copied."""
    device = Device(2)
    first, second = request_of(1, [1]), request_of(2, [1])
    device.publish(first, 0, [0], [1])
    assert device.order() is not None
    device.drop(first.key)
    device.host[0] = 99
    device.copy()
    device.publish(second, 0, [1], [1])
    assert device.tables.entries[second.key] == [1]
    device.promote()
    assert device.slots[device.tables.entries[second.key][0]] == 1


def test_after_a_reset_old_copies_are_not_found_nor_made() -> None:
    device = Device(4)
    old, new = request_of(1, [1, 2]), request_of(2, [1, 2])
    device.publish(old, 0, [0], [1])
    device.promote()
    device.tables.claim(old.key)
    device.promotions.reset()
    device.publish(old, 1, [1], [2])
    device.tables.claims[old.key] = None
    device.promotions.asked(old.key)
    assert device.order() is None
    device.publish(new, 0, [2, 3], [1, 2])
    assert device.tables.entries[new.key] == [2, 3]


def test_a_device_that_fails_is_given_up_and_everyone_sent_back_to_the_host() -> None:
    device = Device(4, chunk=1)
    request = request_of(1, [1, 2, 3])
    device.publish(request, 0, [0, 1, 2], [1, 2, 3])
    device.order()
    device.copy()
    device.order()
    device.copy(ok=False)
    assert device.on_device(request) == 1
    device.close()
    assert device.tables.entries[request.key] == [0, 1, 2]
    device.publish(request_of(2, [1]), 0, [3], [1])
    assert not device.promotions.wanted
    device.drop(request.key)
    assert device.promotions.gauges()["device_slots_free"] == 4


def test_what_is_taken_back_and_published_again_is_named_where_it_lies_by_then() -> None:
    """In other host slots, while the copy of one block is under way and that of another is there."""
    device = Device(4, chunk=1)
    request = request_of(1, [5, 6])
    device.publish(request, 0, [0, 1], [5, 6])
    device.order()
    device.copy()
    device.order()
    device.promotions.dropped(request.key)
    device.tables.entries[request.key].clear()
    device.host[1] = -2
    device.copy()
    device.publish(request, 0, [2, 3], [5, 6])
    assert device.tables.entries[request.key] == [HOST, 3], "the copy that nobody waited for is void"
    device.promote()
    [_, again] = device.tables.entries[request.key]
    assert again >= HOST
    assert device.slots[again] == 6
    device.drop(request.key)
    gauges = device.promotions.gauges()
    assert (gauges["device_slots_free"], gauges["device_slots_idle"]) == (2, 2)


def test_a_digest_that_stands_twice_in_a_hint_is_copied_once() -> None:
    device = Device(4)
    request = request_of(1, [5, 5, 5])
    device.publish(request, 0, [0, 0, 0], [5, 5, 5])
    device.promote()
    assert device.tables.entries[request.key] == [HOST, 0, 0]
    again = request_of(2, [5, 5])
    device.publish(again, 0, [3, 3], [5, 5])
    assert device.tables.entries[again.key] == [HOST, 3], "only one entry would be sent back"
    device.drop(again.key)
    device.drop(request.key)
    assert device.promotions.gauges()["device_slots_idle"] == 1


@pytest.mark.parametrize("waiting", [100, 1600])
def test_a_publication_costs_the_same_however_many_wait(waiting: int) -> None:
    """Counted in looks at flags: what the full device costs one more request does not grow with the queue."""
    device = Device(4)
    for number in range(1, waiting):
        device.publish(request_of(number, [number * 10 + i for i in range(4)]), 0, [0, 1, 2, 3], [0] * 4)
        device.promote()
    assert device.tables.looks < 4 * waiting
