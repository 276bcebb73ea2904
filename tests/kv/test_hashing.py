"""Prompts get the hashes that vLLM itself gives them; otherwise one line says why they cannot be hashed."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator, Sequence

import pytest

from kvprefetch.kv.hashing import ALGORITHMS, BlockHasher, CannotHash

pytestmark = pytest.mark.vllm

WITHOUT_XXHASH = pytest.mark.skipif(importlib.util.find_spec("xxhash") is None, reason="xxhash is not installed")
EACH = [pytest.param(each, marks=WITHOUT_XXHASH if each.startswith("xxhash") else ()) for each in ALGORITHMS]
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


def of_engine(algorithm: str, block_tokens: int = 32) -> BlockHasher:
    """Return a hasher made from the words of an engine in this process."""
    from kvprefetch.connector.attach.hellos import start_and_probe

    start, probe = map(bytes.fromhex, start_and_probe(algorithm))
    return BlockHasher(algorithm, start, block_tokens, probe)


def of_vllm(algorithm: str, tokens: Sequence[int], block_tokens: int = 32, salt: str | None = None) -> bytes:
    """Return the hashes of a real request in an engine, without those that it could not load."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    request = Request(
        request_id="r",
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(block_tokens, function),
    )
    return b"".join(request.block_hashes[: (len(tokens) - 1) // block_tokens])


@pytest.mark.parametrize("seed", [None, "7", "random"])
@pytest.mark.parametrize("algorithm", EACH)
def test_the_hashes_are_vllm_s(algorithm: str, seed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a salt, for token ids of all sizes, up to a long prompt. It fails if vLLM changes its form."""
    if seed is None and algorithm.startswith("xxhash"):
        pytest.skip("its start is random")
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    hasher, draw = of_engine(algorithm), random.Random(algorithm)
    assert hasher.digest_bytes == (16 if algorithm.startswith("xxhash") else 32)
    for count in (1, 31, 32, 33, 64, 65, 100, 20_000):
        for top in (10, 1 << 8, 1 << 16, 1 << 31, 1 << 63):
            tokens = [draw.randrange(top) for _ in range(count)]
            for salt in (None, "", "a", "cache_salt ü" * 30):
                assert hasher(tokens, salt) == of_vllm(algorithm, tokens, salt=salt), (count, top, salt)


def test_the_seed_is_the_engine_s_whatever_this_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "42")
    hasher, wanted = of_engine("sha256"), of_vllm("sha256", TOKENS)
    monkeypatch.setenv("PYTHONHASHSEED", "43")
    assert hasher(TOKENS) == wanted != of_vllm("sha256", TOKENS)


@pytest.mark.parametrize(
    ("algorithm", "start", "probe", "words"),
    [
        ("", b"", b"", "did not say how"),
        ("xxhash", b"", b"", "xxhash begins with a number that is random.*set PYTHONHASHSEED"),
        ("sha256", b"", b"p", "random"),
        ("md5", b"s", b"p", "unknown algorithm='md5' known=sha256,sha256_cbor,xxhash,xxhash_cbor"),
        ("sha256", b"s", b"\x0f", "hashed otherwise here .*algorithm=sha256 here=[0-9a-f]{64} engine=0f; upgrade"),
    ],
)
def test_an_engine_whose_hashes_are_not_known_is_refused_in_one_line(
    algorithm: str, start: bytes, probe: bytes, words: str
) -> None:
    with pytest.raises(CannotHash, match=rf"^prompts .*{words}.*give block hashes$") as caught:
        BlockHasher(algorithm, start, 32, probe)
    assert "\n" not in str(caught.value)


def test_an_engine_of_another_seed_or_form_of_salt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core import kv_cache_utils

    from kvprefetch.connector.attach.hellos import start_and_probe

    start, probe = map(bytes.fromhex, start_and_probe("sha256"))
    with pytest.raises(CannotHash, match="hashed otherwise here"):
        BlockHasher("sha256", start[::-1], 32, probe)
    plain = lambda request, start, end, mm: ((request.cache_salt,) if start == 0 else None, 0)  # noqa: E731
    monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", plain)
    with pytest.raises(CannotHash, match="hashed otherwise here"):
        of_engine("sha256")


@pytest.mark.parametrize(("algorithm", "package"), [("sha256_cbor", "cbor2"), ("xxhash", "xxhash")])
def test_a_missing_package_is_named(algorithm: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CannotHash, match=f"with {algorithm}, which needs the package {package}: install it, or give"):
        BlockHasher(algorithm, b"s", 32, b"p")


def test_a_random_start_is_kept_secret() -> None:
    from kvprefetch.connector.attach.hellos import start_and_probe

    assert start_and_probe("xxhash_cbor") == ("", "")
