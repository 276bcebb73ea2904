"""Store keys: the parts that the daemon adds to a rank's key prefix, and the name that all ranks of an engine share.

    [u<UID>@]KEY_PREFIX[g:WEIGHTS@]HASH

`u<UID>@` names the user of the engine, by the kernel's word: engines of other users have other keys, on every node of
a cluster.  `g:WEIGHTS@` names the weights since a reset (connector/resets.py).  HASH is a block's hash in hex digits.
KEY_PREFIX, which the engine's connector makes, and both other parts end with "@", which is no hex digit: so different
prefixes have no key in common, and no engine can name a key of another user.
"""

from __future__ import annotations

import re

_RANK = re.compile(r"@([tp]p_rank):[0-9*]+(?=@)")


def owner(uid: int, *, shared: bool) -> str:
    """Return the first part of the keys of a user's engines; empty where users share what they store."""
    return "" if shared else f"u{uid}@"


def whole_prefix(owner: str, key_prefix: str, weights: str) -> str:
    """Return the whole prefix of a rank's keys."""
    return f"{owner}{key_prefix}g:{weights}@" if weights else owner + key_prefix


def name_of(prefix: str) -> str:
    """Return the namespace of a whole prefix: `…@tp_rank:3@…` and `…@tp_rank:*@…` give the same one."""
    return _RANK.sub(r"@\1:*", prefix)
