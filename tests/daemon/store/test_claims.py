"""Whose namespaces these are, as a disk tier's folder keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvprefetch.daemon.store.buckets import CLAIM, patterns
from kvprefetch.daemon.store.claims import FILE, Claims


def test_what_was_put_is_there_at_the_next_start_until_it_is_removed(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    assert claims.get("a@fingerprint") == b""
    claims.put("a@fingerprint", b'{"dtype":"x"}')
    claims.put("b@fingerprint", b"{}")
    again = Claims(tmp_path)
    assert again.get("a@fingerprint") == b'{"dtype":"x"}'
    again.remove(patterns(["a@", "c@"])[1])
    assert (Claims(tmp_path).get("a@fingerprint"), Claims(tmp_path).get("b@fingerprint")) == (b"", b"{}")


def test_nothing_is_written_twice(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    claims.put("a", b"x")
    before = (tmp_path / FILE).stat()
    claims.put("a", b"x")
    claims.remove("b")
    assert (tmp_path / FILE).stat().st_ino == before.st_ino


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "7"])
def test_a_file_that_is_none_counts_as_empty(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    claims = Claims(tmp_path)
    assert claims.get("a") == b""
    claims.put("a", b"x")
    assert claims.get("a") == b"x"


def test_without_a_folder_or_one_that_is_gone_nothing_is_kept(tmp_path: Path) -> None:
    for claims in (Claims(None), Claims(tmp_path / "gone")):
        claims.put("a", b"x")
        claims.remove("a")
        assert claims.get("a") == b""


def test_a_removal_takes_a_namespace_s_claim_and_no_other_s() -> None:
    import re

    _, ours = patterns(["llama@"])
    assert re.fullmatch(ours, f"llama@{CLAIM}")
    assert re.fullmatch(ours, "llama@00ff")
    for other in (f"tiny-llama@{CLAIM}", f"llama@tp_rank:0@{CLAIM}", f"llama@{CLAIM}x", "llama@"):
        assert not re.fullmatch(ours, other)
