"""What keeps an engine from KV that the store has: `explain` and `doctor --engine` name it, with a real store."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvprefetch.daemon.engine import index
from kvprefetch.daemon.engine.memory import EngineInfo
from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.kv.hashing import RANDOM, START, seed_of
from tests.daemon.cli.test_doctor_engine import findings, transfer
from tests.daemon.stores import another_client, blocks, request_line, stored
from tests.lab.daemon import Daemon
from tests.support.command import kvprefetchd
from tests.support.engine_side import EngineSpec
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

pytestmark = pytest.mark.store
SAID = {"dtype": "torch.bfloat16", "weights": "aa" * 16, "layout": "cc" * 16}
HASHES = {"hash_algorithm": "sha256", "hash_start": hashlib.sha256(pickle.dumps(START, 5)).hexdigest()}
COLD = "Nobody whom the index knows has block 0 under its hash: it was never stored, or is gone."
SINCE = r"since 20\d\d-\d\d-\d\d \d\d:\d\d UTC"
Serve = Callable[..., Daemon]


def made(daemon: Daemon, name: str, **changes: Any) -> FakeEngine:
    """An engine of the model "llama", with its fingerprint unless another one is given."""
    given: dict[str, Any] = {"prefix": "llama", "fingerprint": SAID, **HASHES, **changes}
    return FakeEngine(daemon.socket, engine_id=name, **given)


def at(daemon: Daemon) -> str:
    return transfer(kv_connector_extra_config={"socket": str(daemon.socket)})


def indexed(daemon: Daemon, folder: Path, count: int) -> list[str]:
    """Wait until the index has so many entries; return their keys."""

    def keys() -> list[str] | None:
        found = json.loads(kvprefetchd("store", "ls", "--json", "--socket", daemon.socket).stdout)["keys"]
        entries = [key for key in found if "kvprefetch.index@" in key]
        return entries if len(entries) == count else None

    return eventually(keys, what=f"{count} entries")


def why(daemon: Daemon, engine: FakeEngine, digests: list[bytes], name: str) -> list[str]:
    """Ask for blocks that are not there; return what `explain` says of it behind the cause."""
    assert engine.load(digests, name=name) is None
    request_line(daemon, name)
    shown = kvprefetchd("explain", "--json", name, "--socket", daemon.socket, given="\n".join(daemon.lines))
    assert shown.returncode == 0, shown
    [request] = json.loads(shown.stdout)["requests"]
    said = list(map(str, request["why"]))
    text = kvprefetchd("explain", name, "--socket", daemon.socket, given="\n".join(daemon.lines)).stdout
    assert all(each in text.splitlines() for each in said)
    return said


def test_a_miss_names_the_field_that_differs_from_the_engine_that_has_the_block(serve: Serve, tmp_path: Path) -> None:
    """And which blocks are where the prompt goes on, where hashes are others, and where nobody has anything."""
    daemon, values = serve(), blocks("llama", 4)
    first, digests = made(daemon, "first"), list(values)
    first.save(values)
    stored(daemon, 4)
    indexed(daemon, tmp_path, 1)
    for field, other in (("dtype", "torch.float16"), ("weights", "bb" * 16), ("quantization", "fp8")):
        second = made(daemon, field, fingerprint={**SAID, field: other})
        [said] = why(daemon, second, digests, f"of-{field}")
        ours = f"{field} (ours {other}, its {SAID.get(field, 'none')})"
        wanted = rf"The store has block 0, {SINCE}, of an engine that differs in {re.escape(ours)}\."
        assert re.fullmatch(wanted, said), said
        found = findings("--model", "/models/llama", "--kv-transfer-config", at(daemon))["daemon"]
        assert [line for line in found if line.startswith("note KV, since") and ours in line], found
        second.close()
    seeded = made(daemon, "seeded", hash_start="01" * 32)
    cold, other = why(daemon, seeded, list(blocks("other hashes", 2)), "seeded")
    assert cold.startswith("Nobody whom the index knows has block 0 under its hash")
    assert re.search(r"differs in PYTHONHASHSEED \(ours set: [0-9a-f]{8}, its none\)\.$", other), other
    wide = made(daemon, "wide", groups=Groups((Group(Kind.FULL, 64),), 64), fingerprint={**SAID, "layout": "d" * 32})
    assert "block_size (ours 64, its 32), layout (" in why(daemon, wide, list(blocks("wide", 2)), "of-wide")[1]
    [said] = why(daemon, first, list(blocks("cold", 2)), "cold")
    assert said == COLD


def test_a_block_behind_one_that_is_gone_tells_of_an_eviction(serve: Serve, tmp_path: Path) -> None:
    daemon, values = serve(), blocks("evicted", 4)
    engine, digests = made(daemon, "first"), list(values)
    engine.save(values)
    stored(daemon, 4)
    keys = json.loads(kvprefetchd("store", "ls", "--json", "--socket", daemon.socket).stdout)["keys"]
    with another_client(daemon, tmp_path) as behind:
        assert behind.remove([key for key in keys if key.endswith(digests[1].hex())]) == (1, 0)
    assert len(engine.load(digests, name="part") or ()) == 1
    request_line(daemon, "part")
    shown = kvprefetchd("explain", "part", "--socket", daemon.socket, given="\n".join(daemon.lines)).stdout
    assert "The store has later blocks of this prompt: block 1 was evicted, purged or lost." in shown
    engine.save({digests[1]: values[digests[1]]})
    stored(daemon, 5)
    shown = kvprefetchd("explain", "part", "--socket", daemon.socket, given="\n".join(daemon.lines)).stdout
    assert "The store has block 1 now." in shown
    engine.close()
    eventually(lambda: daemon.records("engine.detached"), what="its end")
    shown = kvprefetchd("explain", "part", "--socket", daemon.socket, given="\n".join(daemon.lines)).stdout
    assert "Why the store lacks blocks of it is not known: its engine left" in shown


def test_values_that_are_not_ours_say_nothing_and_are_counted(serve: Serve, tmp_path: Path) -> None:
    """Too long, of another owner, at a place of others, with a terminal's control characters, and not JSON."""
    daemon, values = serve(), blocks("hostile", 2)
    engine = made(daemon, "first")
    engine.save(values)
    stored(daemon, 2)
    [key] = indexed(daemon, tmp_path, 1)
    whose = key.partition("kvprefetch")[0]
    good = index.Entry(prefix=f"{whose}llama@", since="now", fields={"model": "llama", "dtype": "torch.float16"})
    other = good.model_copy(update={"prefix": "u4242@llama@"})
    raw = good.model_dump(mode="json")
    long = good.model_copy(update={"fields": {**good.fields, **{f"f{i}": "x" * 400 for i in range(12)}}})
    planted = {
        "0" * 16: b"\0" * 100,
        f"{1:016x}": json.dumps({**raw, "fields": {"dtype": "\x1b[2J"}}).encode(),
        f"{2:016x}": good.model_dump_json().encode(),
        f"{3:016x}": b"x" * (1 << 20),
    }
    with another_client(daemon, tmp_path) as behind:
        for place, value in planted.items():
            behind.note(f"{whose}kvprefetch.index@{place}", value)
        behind.note(other.place(whose), other.model_dump_json().encode())
        behind.note(long.place(whose), long.model_dump_json().encode())
    assert len(long.model_dump_json()) > index.MAX_BYTES
    said = why(daemon, engine, list(blocks("cold", 2)), "cold")
    assert said[1:] == ["The index has values that say nothing: 6."]
    engine.close()


class Notes:
    """A store of small values. `has`: keys of blocks."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.has: set[str] = set()

    def note(self, key: str, value: bytes) -> None:
        self.values.setdefault(key, value)

    def notes(self, keys: Sequence[str], most: int) -> dict[str, bytes]:
        return {key: self.values[key] for key in [key for key in keys if key in self.values][:most]}

    def exist(self, keys: Sequence[str]) -> list[bool]:
        return [key in self.has for key in keys]


def entry(owner: str = "u1@", **changes: Any) -> index.Entry:
    given: dict[str, Any] = {"prefix": "llama", "fingerprint": SAID, **HASHES, **changes}
    spec = EngineSpec(**given)
    found = index.entry_of(
        EngineInfo("e", spec.groups, spec.scheduler(), [spec.worker()], owner=owner), owner + spec.prefix_of()
    )
    assert found is not None
    return found


NAME = b"\7" * 32 + b"\0"
LACKED = ("r", 0, [NAME])


def test_no_user_learns_what_another_one_stored() -> None:
    store: Any = Notes()
    theirs, mine = entry("u2@", fingerprint={**SAID, "dtype": "secret"}), entry()
    theirs.write(store, "u2@")
    store.has.add(theirs.key(NAME))
    assert index.explain(store, "u1@", [mine], "llama", LACKED) == [COLD]
    assert index.explain(store, "u1@", [], "llama", None) == []
    assert "secret" in index.explain(store, "u2@", [], "llama", None)[0]


def test_an_entry_is_small_or_not_there_and_the_first_one_stays() -> None:
    store: Any = Notes()
    entry(fingerprint={f"VLLM_{i}": "x" * 400 for i in range(12)}).write(store, "u1@")
    entry(fingerprint={"unknown": "OSError: no file"}).write(store, "u1@")
    assert store.values == {}
    first = entry()
    first.write(store, "u1@")
    first.model_copy(update={"since": "later"}).write(store, "u1@")
    [value] = store.values.values()
    assert index.Entry.model_validate_json(value) == first
    for unlike in ({"dtype": "a"}, {"weights": "b"}):
        entry(fingerprint={**SAID, **unlike}).write(store, "u1@")
    assert len(store.values) == 3
    assert {len(index.explain(store, "u1@", [each], "llama", None)) for each in (first, entry())} == {2}


def test_what_keeps_all_others_away_is_said() -> None:
    store: Any = Notes()
    mine, unknown = entry(), entry(fingerprint={"unknown": "OSError:\nno file"})
    [said] = index.explain(store, "u1@", [unknown], "llama", LACKED)
    assert said == "No other start of an engine shares: the fingerprint is not known: OSError:\ufffdno file."
    random = entry(hash_start="")
    assert random.fields["PYTHONHASHSEED"] == RANDOM
    assert index.explain(store, "u1@", [random], "llama", LACKED)[0].endswith("set PYTHONHASHSEED.")
    store.has.add(mine.key(NAME))
    assert index.explain(store, "u1@", [mine], "llama", LACKED) == ["The store has block 0 now."]
    assert seed_of("sha256", b"1") == seed_of("none such", b"1") == "set: 6b86b273"
