"""The parts of a key that the daemon adds: whose a value is, and of which weights."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvprefetch.kv.keys import name_of, owner, whole_prefix
from kvprefetch.shmring.wire.attach import WorkerInfo

RANK = "m@tp_rank:%s@pcp0@dcp%s@pp_rank:%s@group:0@fp:00@"


def test_a_key_names_its_user_unless_users_share() -> None:
    assert whole_prefix(owner(1000, shared=False), "m@", "") == "u1000@m@"
    assert whole_prefix(owner(1000, shared=True), "m@", "") == "m@", "upstream's own"


@pytest.mark.parametrize("prefix", ["m@", "u100@m@", "u1000@m@", "00@", "m@g:ff@"])
def test_no_prefix_that_an_engine_may_have_gives_a_key_of_another_user(prefix: str) -> None:
    """Nor of other weights: everything before the hash is given by whose it is, and by a prefix that ends with @."""
    others = {whole_prefix(owner(uid, shared=False), "m@", weights) for uid in (0, 10, 100) for weights in ("", "ff")}
    mine = {whole_prefix(owner(1000, shared=False), prefix, weights) for weights in ("", "0" * 32)}
    assert len(mine) == 2
    assert not any(one.startswith(other) or other.startswith(one) for one in mine for other in others)


def test_all_ranks_of_an_engine_have_one_namespace() -> None:
    names = {
        name_of(whole_prefix("u7@", RANK % rank, "aa")) for rank in ((0, 0, 0), (1, 1, 0), (3, 1, 1), ("*", "*", "*"))
    }
    assert names == {"u7@m@tp_rank:*@pcp*@dcp*@pp_rank:*@group:0@fp:00@g:aa@"}


@pytest.mark.parametrize("prefix", ["model", "model@tp_rank:1", "model@tp_rank:1@ab"])
def test_a_prefix_that_does_not_end_with_an_at_sign_is_refused(prefix: str) -> None:
    """Keys of `m@tp_rank:1` and `m@tp_rank:1a` would have some in common: hashes are hex digits."""
    with pytest.raises(ValidationError, match="should be printable and end with '@'"):
        WorkerInfo(block_bytes=1, key_prefixes=[prefix], replicas=1, replica_index=0)
