"""Index of a user's namespaces in the store: whose KV is there, so that a miss has an answer: what differs, since when.

The daemon writes an entry once an engine's first save is in the store, and asks for it again while it saves.  One that
is not there, or not what we write, or whose slot another has, says nothing.  Nobody reads any before a person asks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Iterable, Sequence
from itertools import compress

from pydantic import BaseModel, ConfigDict, ValidationError

from ...kv.hashing import RANDOM, seed_of
from ..store.client import Store
from ..store.errors import StoreUnavailable
from ..telemetry.pretty import printable
from ..telemetry.trace import Lacked
from .memory import EngineInfo

_place = "{}kvprefetch.index@{:016x}".format  # of an owner, and a slot
SLOTS = 1024  # of a user: one question to the master, about a millisecond
MAX_BYTES, MAX_CHARACTERS = 4096, 1024  # of an entry, of a sentence
MOST_READ, MOST_SAID, MOST_FIELDS = 64, 8, 8
RENEW_NS = 60_000_000_000
HASHING = ("block_size", "prefix_caching_hash_algo", "PYTHONHASHSEED")  # with others, equal prompts have other hashes
UNKNOWN = "unknown"  # the field that says why there is no fingerprint: no other start of an engine shares


class Entry(BaseModel):
    """A namespace: `prefix` of its rank 0's keys in its first KV group, and all that decides who shares it."""

    model_config = ConfigDict(frozen=True, strict=True)

    prefix: str
    since: str
    fields: dict[str, str]

    def key(self, name: bytes) -> str:
        """Return the key of a block in this namespace: of its first shard, which is rank 0's."""
        return re.sub(r"@group:\d+@", f"@group:{name[-1]}@", self.prefix) + name[:-1].hex()

    def place(self, owner: str) -> str:
        text = json.dumps(self.fields, sort_keys=True).encode()
        return _place(owner, int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") % SLOTS)

    def write(self, store: Store, owner: str) -> None:
        """Store it unless it is there; then the store keeps it. Blocks."""
        if UNKNOWN not in self.fields and len(value := self.model_dump_json().encode()) <= MAX_BYTES:
            with contextlib.suppress(StoreUnavailable):
                store.note(self.place(owner), value)


def entry_of(engine: EngineInfo, prefix: str) -> Entry | None:
    """Return the entry of an engine whose keys begin so; None where it did not say its fingerprint."""
    if not (said := engine.workers[0].fingerprint):
        return None
    wants, weights = engine.scheduler, re.search(r"@g:([0-9a-f]+)@$", prefix)
    fields = {
        "model": engine.model,
        "cache_prefix": engine.workers[0].key_prefixes[0].partition("@tp_rank:")[0].rpartition("@")[0],
        "block_size": ",".join(str(each.block_tokens) for each in engine.groups.groups),
        "prefix_caching_hash_algo": wants.hash_algorithm,
        "PYTHONHASHSEED": seed_of(wants.hash_algorithm, bytes.fromhex(wants.hash_start)),
        "checksums": "on" if "@sum:" in prefix else "",
        "weights_since_reset": weights[1] if weights is not None else "",
    }
    shown = {name: value for name, value in fields.items() if value}
    return Entry(prefix=prefix, since=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), fields=said | shown)


def explain(store: Store, owner: str, mine: Sequence[Entry], model: str, lacked: Lacked | None) -> list[str]:
    """Say what keeps engines from KV that others of this user stored; without one, what it has of a model. Blocks."""
    entries, bad, said = list[Entry](), 0, list[str]()
    for key, value in store.notes([_place(owner, slot) for slot in range(SLOTS)], MOST_READ).items():
        with contextlib.suppress(ValidationError):
            entry = Entry.model_validate_json(value if len(value) <= MAX_BYTES else b"")
            if entry.place(owner) == key and entry.prefix.startswith(owner):
                entries.append(entry)
                continue
        bad += 1
    for each in mine[: None if lacked is None else 1]:
        others = [other for other in entries if other.fields != each.fields]
        if UNKNOWN in each.fields:
            said.append(f"No other start of an engine shares: the fingerprint is not known: {each.fields[UNKNOWN]}.")
        else:
            said += _unlike("KV", each, others) if lacked is None else _of_block(store, each, others, lacked)
    for each in () if mine else entries:
        if each.fields.get("model") == model:
            fields = " ".join(f"{name}={value}" for name, value in sorted(each.fields.items()))
            said.append(f"KV of it is in the store, since {each.since}: {fields}.")
    said[MOST_SAID:] = [f"The index has values that say nothing: {bad}."] if bad else []
    return [printable(each)[:MAX_CHARACTERS] for each in dict.fromkeys(said)]


def _of_block(store: Store, mine: Entry, others: Sequence[Entry], lacked: Lacked) -> list[str]:
    block, names = f"block {lacked[1]}", lacked[2]
    first, *behind = store.exist([mine.key(name) for name in names])
    holders = list(compress(others, store.exist([each.key(names[0]) for each in others])))
    said, gone = [f"The store has {block} now."] if first else [], any(behind) and not first
    if gone:
        said = [f"The store has later blocks of this prompt: {block} was evicted, purged or lost."]
    elif mine.fields.get("PYTHONHASHSEED") == RANDOM:
        said = [f"Nobody else has {block}: hashes of this engine begin with a random number; set PYTHONHASHSEED."]
    elif not first and not holders:
        said = [f"Nobody whom the index knows has {block} under its hash: it was never stored, or is gone."]
    if holders or gone:
        return [*said, *_unlike(f"The store has {block}", mine, holders)]
    same = [e for e in others if any(e.fields.get(name) != mine.fields.get(name) for name in HASHING)]
    same = [e for e in same if e.fields.get("model") == mine.fields.get("model")]
    return [*said, *_unlike("Under other hashes the store may have it", mine, same)]


def _unlike(what: str, mine: Entry, others: Iterable[Entry]) -> list[str]:
    """Say in which fields others differ, the nearest first."""
    found = list[tuple[int, str]]()
    for each in others:
        ours, theirs = mine.fields, each.fields
        differ = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
        some = [f"{name} (ours {ours.get(name, 'none')}, its {theirs.get(name, 'none')})" for name in differ]
        some[MOST_FIELDS:] = [f"{len(some) - MOST_FIELDS} more"] if len(some) > MOST_FIELDS else []
        found.append((len(differ), f"{what}, since {each.since}, of an engine that differs in {', '.join(some)}."))
    return [said for _, said in sorted(found)[:MOST_SAID]]
