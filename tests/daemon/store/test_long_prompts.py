"""What a look-up of a long prompt costs at a real master, where a model has several KV groups."""

from __future__ import annotations

import ctypes
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvprefetch.daemon.engine import transfers
from kvprefetch.daemon.engine.lookups import FIRST_DIGESTS, SLICE_DIGESTS
from kvprefetch.daemon.engine.transfers import RankLayout
from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.kv.prompts import Prompt
from kvprefetch.shmring.wire.attach import WorkerInfo
from tests.daemon.stores import another_client
from tests.lab.daemon import Daemon

TOKENS, SIZE = 128 << 10, 64
# DeepSeek-V4's, and full attention with four windows in blocks of 16 tokens.
COMPRESSED = Groups(
    (
        Group(Kind.WINDOW, 64, 128),
        Group(Kind.WINDOW, 64, 128),
        Group(Kind.FULL, 256),
        Group(Kind.WINDOW, 8, 128),
        Group(Kind.WINDOW, 4, 8),
    ),
    4,
)
WINDOWS = Groups((Group(Kind.FULL, 16), *[Group(Kind.WINDOW, 16, 1024)] * 4), 16)


@pytest.mark.stress
@pytest.mark.parametrize("there", [True, False], ids=["hit", "windows missing"])
@pytest.mark.parametrize("groups", [COMPRESSED, WINDOWS], ids=["compressed", "windows"])
def test_a_prompt_of_128k_tokens_in_five_groups_is_looked_up_soon(groups: Groups, there: bool, tmp_path: Path) -> None:
    """Printed: milliseconds, the median of 20, and the greatest."""
    blocks = TOKENS // groups.unit_tokens
    hashes = b"".join(number.to_bytes(32, "big") for number in range(groups.digests(blocks)))
    prefixes = [f"p{number}@" for number in range(len(groups))]
    workers = [WorkerInfo(block_bytes=SIZE, key_prefixes=prefixes, replicas=1, replica_index=0)]
    staging: Any = SimpleNamespace(block_bytes=[SIZE], sum_bytes=0)
    ranks = RankLayout.of(workers, staging)

    value = ctypes.create_string_buffer(b"\1" * SIZE, SIZE)

    def looked_up() -> Prompt:
        prompt = Prompt(groups, hashes, range(blocks), room=1 << 20, staged=lambda _: False)
        most = FIRST_DIGESTS
        while names := prompt.next(most):
            (found,) = transfers.look_up(store, ranks, [names], media=False)
            prompt.found(found.present, found.on_disk)
            most = SLICE_DIGESTS
        return prompt

    with Daemon(memory="256MiB", staging="1MiB") as daemon, another_client(daemon, tmp_path) as store:
        whole = Prompt(groups, hashes, range(blocks), room=1 << 20, staged=lambda _: False)
        while names := whole.next(SLICE_DIGESTS):
            keys = [key for key in ranks.keys(names) if there or key.startswith(f"p{groups.first_full}@")]
            put = store.put_from(keys, [ctypes.addressof(value)] * len(keys), [SIZE] * len(keys))
            assert set(put) <= {ErrorClass.OK}
            whole.found(b"\1" * len(names), b"")
        took = []
        for _ in range(20):
            began = time.perf_counter()
            prompt = looked_up()
            took.append(1000 * (time.perf_counter() - began))
        print(f"{statistics.median(took):.2f} ms, {max(took):.2f} at most")
        assert prompt.choose().blocks == (blocks if there else 0)
        assert max(took) < 5000
