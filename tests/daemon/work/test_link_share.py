"""The link shared between loads and saves, over generated histories: a link, loads and puts on a clock of the test."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprefetch.daemon.work import link_share
from kvprefetch.daemon.work.link_share import PUT_NS, SHARE, LinkShare

MS = 1_000_000
CHUNK = 4 << 20


@dataclass
class Link:
    """A link of so many bytes per ns, which its flows share alike; `loads` chunks are always in flight.

    Each put is of whole blocks, `least` at least, and takes `idle_ns` beside its transfer.
    """

    rate: float
    loads: int
    block: int = 64 << 10
    least: int = CHUNK // 4
    idle_ns: int = MS
    share: LinkShare = field(default_factory=LinkShare)
    now: int = 0
    saved: int = 0
    moved: float = 0.0
    puts: list[int] = field(default_factory=list)
    _left: list[float] = field(default_factory=list)
    _put: tuple[int, int, float] | None = None  # bytes, begin, bytes left
    always: bool = True  # a put was in flight all the time

    def run(self, ns: int, *, saving: bool = True, moving: bool = True) -> None:
        """Let so much time go by; the loads are in flight, but stand still, unless `moving`."""
        end = self.now + ns
        while self.now < end:
            self._left += [float(CHUNK)] * (self.loads - len(self._left))
            self.share.compete(self.now, both=bool(self._left) and (saving or self._put is not None))
            if self._put is None and saving and self.share.open(self.now):
                size = max(self.least, self.share.put_bytes) // self.block * self.block or self.block
                self.share.started(size, self.now)
                self._put = (size, self.now, size)
                self.puts.append(size)
            self.always &= self._put is not None
            self._step(moving)

    def _step(self, moving: bool) -> None:
        tick = MS // 2
        self.now += tick
        sending = self._put is not None and self.now > self._put[1] + self.idle_ns
        flows = (len(self._left) if moving else 0) + sending
        part = self.rate * tick / max(1, flows)
        if moving:
            self._left = [left - part for left in self._left]
            for left in [left for left in self._left if left <= 0]:
                self._left.remove(left)
                self.share.loaded(CHUNK)
                self.moved += CHUNK
        if self._put is not None and sending:
            size, began, left = self._put
            self._put = (size, began, left - part)
            if left <= part:
                self.share.ended(size, size, self.now - began)
                self.saved += size
                self._put = None


def check(link: Link, ns: int, *, moving: bool = True) -> None:
    """In the last `ns` nanoseconds saves had a fifth of what the link moved, and not much more.

    Where the loads stand still: a fifth of what puts alone reach.
    """
    size = max(link.puts)
    whole = link.moved + link.saved if moving else ns * size / (link.idle_ns + size / link.rate)
    got, slack = link.saved / whole, (2 * max(size, link.least) + SHARE * link.loads * CHUNK) / whole
    fair = min(SHARE, 1 / (link.loads + 1)) if moving else SHARE  # what a put in flight all the time gets
    assert got >= fair * 0.85 - slack or link.always, got
    assert got <= SHARE * 1.2 + slack, got


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([0.05, 0.125, 0.5, 1.0, 6.0]),
    st.integers(1, 6),
    st.sampled_from([4 << 10, 64 << 10, 2 << 20, 5 << 20]),
    st.sampled_from([0, MS, 3 * MS]),
    st.booleans(),
)
def test_saves_get_a_fifth_of_a_link_while_loads_never_stop(
    rate: float, loads: int, block: int, idle_ns: int, moving: bool
) -> None:
    """Whether the loads fill the link or wait for something else. Beside many loads a put is always in flight."""
    link = Link(rate, loads, block, idle_ns=idle_ns)
    link.run(1000 * MS, moving=moving)
    link.saved, link.moved, link.always, link.puts = 0, 0, True, link.puts[-1:]
    link.run(3000 * MS, moving=moving)
    check(link, 3000 * MS, moving=moving)


def test_a_share_that_is_not_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted violations: a smaller share, a larger one, and one that forgets what the loads moved."""
    for planted in (SHARE / 2, 2 * SHARE):
        with monkeypatch.context() as patch:
            patch.setattr(link_share, "SHARE", planted)
            link = Link(0.125, 1)
            link.run(5000 * MS)
        with pytest.raises(AssertionError):
            check(link, 5000 * MS)
    monkeypatch.setattr(LinkShare, "loaded", lambda *_: None)
    link = Link(0.125, 2)
    link.run(5000 * MS)
    with pytest.raises(AssertionError):
        check(link, 5000 * MS)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 400)), min_size=2, max_size=12))
def test_no_rest_is_saved_up_and_none_is_held_against_saves(history: list[tuple[bool, bool, int]]) -> None:
    """Whatever came before: in the next second saves have their fifth, and no more than two puts beyond it."""
    link = Link(0.125, 1)
    for saving, moving, ms in history:
        link.run(ms * MS, saving=saving, moving=moving)
    link.run(100 * MS, saving=False)
    link.saved, link.moved, link.always, link.puts = 0, 0, True, [link.least]
    link.run(1000 * MS)
    check(link, 1000 * MS)


def test_saves_have_the_whole_link_when_nothing_is_loaded_and_puts_grow_with_its_rate() -> None:
    sizes = []
    link = Link(0.0, 0)
    for link.rate in (0.0125, 0.125, 1.0, 10.0, 0.25):
        link.run(2000 * MS)
        at = len(link.puts)
        link.saved = 0
        link.run(2000 * MS)
        assert link.saved / (link.rate * 2000 * MS) > 0.8
        sizes.append(link.puts[at])
    assert sizes[0] == CHUNK // 4, "on a slow link a put lasts longer, instead of losing its time to its round trips"
    assert sizes[:4] == sorted(sizes[:4])
    assert sizes[4] < 3 << 20, "they shrink again with the rate"
    assert sizes[3] == pytest.approx(10.0 * (PUT_NS - MS), rel=0.1)


def test_what_was_there_already_used_nothing_of_the_link() -> None:
    """A put of blocks that another engine stored moves no bytes, is not charged, and says nothing of the rate."""
    share, rate = LinkShare(), LinkShare().rate
    share.compete(0, both=True)
    share.loaded(100 << 20)
    for number in range(1000):
        now = number * MS
        assert share.open(now)
        share.started(1 << 20, now)
        share.ended(1 << 20, 0, MS)
    assert share.rate == rate


@pytest.mark.parametrize("loaded_at_once", [0, 1 << 20])
def test_a_put_that_a_store_held_up_is_forgotten_soon(loaded_at_once: int) -> None:
    """It says nothing of the link's rate: saves have their share of its time again after seconds, not minutes."""
    share, size = LinkShare(), 16 << 20
    share.compete(0, both=True)
    now, stalled = 0, 60_000 * MS
    share.started(size, now)
    share.ended(size, size, now := stalled)
    puts = 0
    while now < stalled + 20_000 * MS:
        share.loaded(loaded_at_once)
        if share.open(now):
            puts += 1
            share.started(size, now)
            now += 13 * MS
            share.ended(size, size, 13 * MS)
        now += 10 * MS
    assert puts > 50
