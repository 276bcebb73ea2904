"""Values that are known to be bad, for as long as that is believed."""

from __future__ import annotations

from kvprefetch.daemon.planning.bad_values import BAD_NS, MAX_ENTRIES, BadValues


def test_a_bad_value_is_known_until_it_is_old_or_arrives_or_has_another_key() -> None:
    bad = BadValues()
    for at, digest in enumerate((b"a", b"b", b"c")):
        bad.add(digest, at, asked_ns=at)
    assert bad.known([b"x", b"a", b"b", b"c"], BAD_NS) == [2, 3]
    bad.forget([b"b", b"x"])
    assert bad.known([b"b", b"c"], 3) == [1]
    bad.clear(5)
    assert bad.known([b"c"], 6) == []
    bad.add(b"c", 6, asked_ns=5)
    assert bad.known([b"c"], 6) == [], "the store was asked for an older key"
    bad.add(b"c", 7, asked_ns=6)
    assert bad.known([b"c"], 7) == [0]


def test_as_many_as_are_bad_are_bounded() -> None:
    bad = BadValues()
    digests = [number.to_bytes(4, "big") for number in range(MAX_ENTRIES + 10)]
    for digest in digests:
        bad.add(digest, 0, asked_ns=0)
    assert bad.known(digests, 1) == list(range(10, MAX_ENTRIES + 10)), "the oldest are forgotten"
