"""Reads, writes and removes values in a store. Mooncake's client runs in a process of its own.

Its calls can crash the process, and its close holds the GIL.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.lab.process import PARENT_VARIABLE, REPO, die_with_parent

# vllm/v1/core/kv_cache_utils.py: the seed of the hash chain where PYTHONHASHSEED is not set.
_SEED = "vllm-none-hash"
_ANSWER = "answer: "
GETS = 20
HAS_LEASE = -706


class ControlError(RuntimeError):
    """The store refused; the message says which key and code."""


def chunk_hashes(tokens: Sequence[int], block_size: int = 32) -> list[bytes]:
    """vLLM's sha256 hashes of the full blocks of a prompt, as ``prefix_caching_hash_algo="sha256"`` makes them."""

    def digest(value: object) -> bytes:
        return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()

    parent = digest(os.environ.get("PYTHONHASHSEED", _SEED))
    hashes = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = digest((parent, tuple(tokens[start : start + block_size]), None))
        hashes.append(parent)
    return hashes


def block_keys(
    model: Path | str, tokens: Sequence[int], block_size: int = 32, *, tp_rank: int = 0, group: int = 0, dcp: int = 1
) -> list[str]:
    """Keys under which vLLM's Mooncake connector stores the blocks of a prompt in a KV group (no cache prefix).

    kvprefetch's are the same with ``key_format="vllm"``; by default there are as many.  `dcp`: ranks that share the
    tokens of a block.
    """
    prefix = f"{Path(model).name}@tp_rank:{tp_rank}@pcp0@dcp{tp_rank % dcp}@pp_rank:0@group:{group}@"
    return [prefix + each.hex() for each in chunk_hashes(tokens, block_size)]


def read_digests(config: Path, keys: Sequence[str], size: int | None = None) -> list[str | None]:
    """sha256 of each key's value, None where the store has none: compares what two writers stored.

    `size`: of so many bytes of each, from its begin.
    """
    return _ask({"op": "digests", "keys": list(keys), "size": size}, config)


def remove(config: Path, keys: Sequence[str]) -> None:
    """Remove keys, leased ones too, so that another writer can be compared."""
    _ask({"op": "remove", "keys": list(keys)}, config)


def unleased(config: Path, keys: Sequence[str]) -> list[str]:
    """Remove the keys that no lease protects, and return them; those that are missing count too."""
    return [key for key in _ask({"op": "unleased", "keys": list(keys)}, config) if key is not None]


def put(config: Path, values: Mapping[str, bytes], segment: str) -> None:
    """Store values in the memory of one storage node (:attr:`tests.lab.store.Store.segments`)."""
    found = [value.hex() for value in values.values()]
    _ask({"op": "put", "keys": list(values), "values": found, "segment": segment}, config)


class Reader:
    """A client of the store that ``config`` names, in a process of its own, for many questions; a context manager."""

    def __init__(self, config: Path) -> None:
        self._config = config

    def __enter__(self) -> Reader:
        self._errors = tempfile.TemporaryFile()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.lab.control", str(self._config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=REPO,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self._child.kill()
        self._child.communicate()
        self._errors.close()

    def digests(self, keys: Sequence[str]) -> list[str | None]:
        """sha256 of each key's value, None where the store has none."""
        return self.ask({"op": "digests", "keys": list(keys)})

    def ask(self, command: dict[str, object]) -> list[str | None]:
        """One command, one answer. Raises ControlError when the store refused or does not answer for 90 seconds."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        late = threading.Timer(90.0, self._child.kill)
        late.start()
        try:
            self._child.stdin.write(json.dumps(command) + "\n")
            self._child.stdin.flush()
            # Mooncake prints on both outputs: the answer is the line that says so.
            for line in self._child.stdout:
                if line.startswith(_ANSWER):
                    answer: list[str | None] = json.loads(line[len(_ANSWER) :])
                    return answer
        except OSError:
            pass  # it ended; why stands in what it printed
        finally:
            late.cancel()
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        raise ControlError(f"exit code {self._child.wait()}: {text[-2000:]}")


def _ask(command: dict[str, object], config: Path) -> list[str | None]:
    with Reader(config) as reader:
        return reader.ask(command)


def _main() -> None:
    die_with_parent()
    settings = json.loads(Path(sys.argv[1]).read_text())
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(
        settings["master_server_address"].partition(":")[0],  # of this machine, on the side of the link
        settings["metadata_server"],
        0,
        64 << 20,
        settings["protocol"],
        settings["device_name"],
        settings["master_server_address"],
    )
    if code != 0:
        raise ControlError(f"no connection to {settings['master_server_address']}: {code}")
    for line in sys.stdin:
        print(f"\n{_ANSWER}{json.dumps(_do(store, json.loads(line)))}", flush=True)
    # No close(): it takes two seconds, and the process ends anyway.
    os._exit(0)


def _value(store: Any, key: str) -> bytes | None:
    """The value of a key that was there a moment ago, None when it is not there any more.

    A get that fails says b"", as an empty value does, which no KV block is: on a machine with no core to spare it may
    outlast its lease. Each get is its own allocation in the client's buffer: a batch would need room for all values.
    """
    for _ in range(GETS):
        value: bytes = store.get(key)
        if value:
            return value
        if store.is_exist(key) == 0:
            return None
        time.sleep(0.2)
    raise ControlError(f"{key} is there and cannot be read")


def _do(store: Any, command: dict[str, Any]) -> list[str | None]:
    keys: list[str] = command["keys"]
    if not keys:
        return []
    if command["op"] == "put":
        from mooncake.store import ReplicateConfig

        where = ReplicateConfig()
        where.preferred_segment = command["segment"]
        for key, value in zip(keys, command["values"], strict=True):
            if (code := store.put(key, bytes.fromhex(value), where)) != 0:
                raise ControlError(f"put {key}: {code}")
    if command["op"] == "unleased":
        return [None if store.remove(key) == HAS_LEASE else key for key in keys]
    found = store.batch_is_exist(keys)
    values = [_value(store, key) if code == 1 else None for key, code in zip(keys, found, strict=True)]
    if command["op"] == "remove":
        for key in keys:
            if (code := store.remove(key, force=True)) != 0:
                raise ControlError(f"remove {key}: {code}")
    size = command.get("size")
    return [None if value is None else hashlib.sha256(value[:size]).hexdigest() for value in values]


if __name__ == "__main__":
    _main()
