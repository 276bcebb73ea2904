"""Keys of blocks in the store: what decides whose KV a value is.

    [u<UID>@][cache_prefix@]model@tp_rank:R@pcpP@dcpD@pp_rank:Q@group:G@[fp:FINGERPRINT@][sum:xxh3@][g:WEIGHTS@]HASH

Without the five optional parts this is, byte for byte, a key of vLLM's MooncakeStoreConnector.  The engine makes what
is between the user and the checksum, and the daemon adds the others: `u<UID>@` names the user of the engine, by the
kernel's word, so engines of other users have other keys on every node of a cluster; `sum:xxh3@` says that a value ends
with a checksum of what is before; `g:WEIGHTS@` names the weights since a reset (connector/attach/resets.py).  HASH is a
block's hash in hex digits.  All parts before it end with "@", which is no hex digit: so different prefixes have no key
in common, and no engine can name a key of another user.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_RANK = re.compile(r"@([tp]p_rank:|pcp|dcp)[0-9*]+(?=@)")


def rank_prefix(
    model: str, *, tp_rank: int, pp_rank: int, group: int, cache_prefix: str = "", context: Sequence[int] = (0, 0)
) -> str:
    """Return the prefix of a rank's keys of a KV group; `model`: its path or name; `context`: pcp_rank and dcp_rank."""
    namespace = f"{cache_prefix}@" if cache_prefix else ""
    name = model.rstrip("/").split("/")[-1]
    pcp_rank, dcp_rank = context
    return f"{namespace}{name}@tp_rank:{tp_rank}@pcp{pcp_rank}@dcp{dcp_rank}@pp_rank:{pp_rank}@group:{group}@"


def with_fingerprint(prefix: str, fingerprint: str) -> str:
    """Return the prefix of keys that only engines with this fingerprint (hex digits) have."""
    return f"{prefix}fp:{fingerprint}@"


def owner(uid: int, *, shared: bool) -> str:
    """Return the first part of the keys of a user's engines; empty where users share what they store."""
    return "" if shared else f"u{uid}@"


def whole_prefix(owner: str, key_prefix: str, weights: str, *, summed: bool = False) -> str:
    """Return the whole prefix of a rank's keys. `summed`: of values with a checksum."""
    return owner + key_prefix + ("sum:xxh3@" if summed else "") + (f"g:{weights}@" if weights else "")


def name_of(prefix: str) -> str:
    """Return the namespace of a whole prefix: `…@tp_rank:3@…` and `…@tp_rank:*@…` give the same one."""
    return _RANK.sub(r"@\1*", prefix)
