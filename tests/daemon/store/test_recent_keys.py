"""The keys that a client used lately: all of the last ones, and not many more."""

from __future__ import annotations

from kvprefetch.daemon.store.recent_keys import MAX_KEYS, RecentKeys


def test_the_last_keys_are_there_and_memory_is_bounded() -> None:
    recent, batch = RecentKeys(), 1000
    last: list[str] = []
    for start in range(0, 4 * MAX_KEYS, batch):
        keys = [f"k{start + i}" for i in range(batch)]
        recent.add(iter(keys))
        last = [*last, *keys][-MAX_KEYS:]
        assert len(recent.all()) < 2 * (MAX_KEYS + batch)
    assert set(last) <= set(recent.all())


def test_a_key_added_again_is_as_good_as_new() -> None:
    recent = RecentKeys()
    recent.add(["again"])
    for start in range(0, 4 * MAX_KEYS, MAX_KEYS // 2):
        recent.add(f"k{start + i}" for i in range(MAX_KEYS // 2))
        recent.add(["again"])
        assert "again" in recent.all()


def test_a_discarded_key_is_gone_wherever_it_was() -> None:
    recent = RecentKeys()
    recent.add(f"k{i}" for i in range(MAX_KEYS))
    recent.add(["k0", "new"])
    recent.discard(["k0", "new", "absent"])
    assert not {"k0", "new"} & set(recent.all())
    assert len(recent.all()) == MAX_KEYS - 1
