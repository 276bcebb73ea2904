"""Whose namespaces these are, as a disk tier's folder keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvprefetch.daemon.store.buckets import FINGERPRINT, patterns
from kvprefetch.daemon.store.fingerprints import FILE, Fingerprints


def test_what_was_put_is_there_at_the_next_start_until_it_is_removed(tmp_path: Path) -> None:
    kept = Fingerprints(tmp_path)
    assert kept.get("a@fingerprint") == b""
    kept.put("a@fingerprint", b'{"dtype":"x"}')
    kept.put("b@fingerprint", b"{}")
    again = Fingerprints(tmp_path)
    assert again.get("a@fingerprint") == b'{"dtype":"x"}'
    again.remove(patterns(["a@", "c@"])[1])
    assert (Fingerprints(tmp_path).get("a@fingerprint"), Fingerprints(tmp_path).get("b@fingerprint")) == (b"", b"{}")


def test_nothing_is_written_twice(tmp_path: Path) -> None:
    kept = Fingerprints(tmp_path)
    kept.put("a", b"x")
    before = (tmp_path / FILE).stat()
    kept.put("a", b"x")
    kept.remove("b")
    assert (tmp_path / FILE).stat().st_ino == before.st_ino


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "7"])
def test_a_file_that_is_none_counts_as_empty(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    kept = Fingerprints(tmp_path)
    assert kept.get("a") == b""
    kept.put("a", b"x")
    assert kept.get("a") == b"x"


def test_without_a_folder_or_one_that_is_gone_nothing_is_kept(tmp_path: Path) -> None:
    for kept in (Fingerprints(None), Fingerprints(tmp_path / "gone")):
        kept.put("a", b"x")
        kept.remove("a")
        assert kept.get("a") == b""


def test_a_removal_takes_a_namespace_s_fingerprint_and_no_other_s() -> None:
    import re

    _, ours = patterns(["llama@"])
    assert re.fullmatch(ours, f"llama@{FINGERPRINT}")
    assert re.fullmatch(ours, "llama@00ff")
    for other in (f"tiny-llama@{FINGERPRINT}", f"llama@tp_rank:0@{FINGERPRINT}", f"llama@{FINGERPRINT}x", "llama@"):
        assert not re.fullmatch(ours, other)


def test_a_removal_takes_every_rank_s_part() -> None:
    """A block whose parts are of two kinds of engines would be wrong."""
    import re

    mooncake, ours = patterns(["a.b@llama@tp_rank:1@pcp0@dcp0@pp_rank:0@group:0@"])
    for pattern in (mooncake, ours):
        for rank in ("tp_rank:0@pcp0@dcp0@pp_rank:0", "tp_rank:15@pcp0@dcp0@pp_rank:3"):
            assert re.fullmatch(pattern, f"a.b@llama@{rank}@group:0@00ff")
        assert not re.fullmatch(pattern, "a.b@llama@tp_rank:0@pcp0@dcp0@pp_rank:0@group:1@00ff")
        assert not re.fullmatch(pattern, "aXb@llama@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@00ff")
