"""Hashes of prompts are the engine's; otherwise the error says why they cannot be."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvprefetch.connector.hellos import hash_probe
from kvprefetch.daemon.cli.prompts import CannotHash, Prompt, PromptHasher
from kvprefetch.shmring.wire.admin import Warmed

pytestmark = pytest.mark.vllm

TOKENS = list(range(1000, 1100))


@pytest.fixture(autouse=True)
def _seed_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM keeps one start hash per process."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    yield
    monkeypatch.undo()
    init_none_hash(sha256)


def engine(algorithm: str = "sha256", probe: str | None = None, block_tokens: int = 32) -> Warmed:
    known: Any = {"hash_algorithm": algorithm, "hash_probe": hash_probe(algorithm) if probe is None else probe}
    return Warmed(engine="e", epoch=1, block_tokens=block_tokens, hash_tokens=block_tokens, **known)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("seed", [None, "7"])
def test_the_hashes_are_vllm_s(algorithm: str, seed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens, resolve_none_hash_seed

    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    function = get_hash_fn_by_name(algorithm)
    before = BlockHash(function(resolve_none_hash_seed(function)))
    wanted = []
    for start in (0, 32, 64):
        wanted.append(before := hash_block_tokens(function, before, TOKENS[start : start + 32]))
    assert PromptHasher(engine(algorithm))(Prompt(prompt_token_ids=TOKENS)) == wanted


def test_a_block_is_left_out_that_would_leave_nothing_to_compute() -> None:
    hashed = PromptHasher(engine())
    counts = {n: len(hashed(Prompt(prompt_token_ids=TOKENS[:n]))) for n in (1, 31, 32, 33, 64, 65, 97)}
    assert counts == {1: 0, 31: 0, 32: 0, 33: 1, 64: 1, 65: 2, 97: 3}


def test_processes_started_later_inherit_no_log_level() -> None:
    before = dict(os.environ)
    PromptHasher(engine())(Prompt(prompt_token_ids=TOKENS))
    assert dict(os.environ) == before


def test_a_salt_changes_every_hash() -> None:
    hashed = PromptHasher(engine())
    plain, salted = (hashed(Prompt(prompt_token_ids=TOKENS, cache_salt=salt)) for salt in (None, "salt"))
    assert not set(plain) & set(salted)


def test_a_random_start_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hash_probe("xxhash") == ""
    with pytest.raises(CannotHash, match=r"xxhash.*random.*set PYTHONHASHSEED.*or list hashes"):
        PromptHasher(engine("xxhash"))(Prompt(prompt_token_ids=TOKENS))


def test_another_seed_than_the_engine_s_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    there = engine()
    monkeypatch.setenv("PYTHONHASHSEED", "42")
    hashed = PromptHasher(there)
    for _ in range(2):
        with pytest.raises(CannotHash, match=r"hashed otherwise here.*PYTHONHASHSEED \(here 42\)"):
            hashed(Prompt(prompt_token_ids=TOKENS))


def test_an_engine_that_did_not_say_is_refused() -> None:
    with pytest.raises(CannotHash, match="did not say how"):
        PromptHasher(engine("", ""))(Prompt(prompt_token_ids=TOKENS))


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    there = engine()
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CannotHash, match="need the engine's vLLM in the environment of this command, hashes do not"):
        PromptHasher(there)(Prompt(prompt_token_ids=TOKENS))
