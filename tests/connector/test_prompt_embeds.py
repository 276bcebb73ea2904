"""Prompts of embeddings: loaded and saved where their hashes name their KV, left alone where vLLM's hashes do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from kvprefetch.shmring.wire.attach import Absent  # noqa: E402
from tests.connector.fakes import BLOCK, Engine  # noqa: E402
from tests.connector.real import RealEngine  # noqa: E402

TOKENS = 2 * BLOCK + 1
ROWS = torch.arange(4.0 * TOKENS).reshape(TOKENS, 4)


def mixed(*, token_at: int | None = None) -> dict[str, Any]:
    """A prompt of embeddings with, perhaps, the token 0 at one position, whose row is there and unused."""
    kinds = [position == token_at for position in range(TOKENS)]
    return {"prompt_embeds": ROWS, "prompt_is_token_ids": kinds}


@pytest.fixture
def engine(tmp_path: Path) -> RealEngine:
    return RealEngine(tmp_path, credits=range(16))


def test_vllm_hashes_a_token_and_an_embedding_alike(engine: RealEngine) -> None:
    """Why a mixed prompt has no name for its KV: the mask is in no hash. Once it is, such prompts can be served."""
    one = engine.add("one", [0] * TOKENS, **mixed(token_at=3))
    other = engine.add("other", [0] * TOKENS, **mixed())
    assert one.block_hashes == other.block_hashes
    assert [*one.all_token_ids] == [*other.all_token_ids]
    engine.finish()


def test_a_prompt_of_tokens_and_embeddings_is_neither_hinted_nor_loaded_nor_saved(engine: RealEngine) -> None:
    engine.add("mixed", [0] * TOKENS, **mixed(token_at=3))
    engine.finish()
    assert engine.tokens["mixed"] == [3, 3, 3]
    assert engine.daemon.hints == []
    assert engine.orders() == engine.orders("saves") == []
    assert engine.side.counters["hints"] == 0


def test_a_prompt_of_embeddings_alone_is_hinted_and_saved_until_a_mixed_one_came(engine: RealEngine) -> None:
    """Its blocks in the engine's own cache may be a mixed prompt's then."""
    engine.add("first", None, prompt_embeds=ROWS)
    engine.stage("first", 0)
    engine.finish()
    assert engine.side.counters["hints"] == 1
    assert sum(len(order.block_ids) for order in engine.orders("saves")) == 2
    engine.add("waiting", None, prompt_embeds=ROWS + 1)
    engine.add("mixed", [0] * TOKENS, **mixed(token_at=3))
    engine.add("later", None, prompt_embeds=ROWS + 2)
    engine.add("tokens", TOKENS)
    for name in ("waiting", "later", "tokens"):
        engine.stage(name, 0)
    engine.finish()
    assert engine.side.counters["hints"] == 4
    assert sum(len(order.block_ids) for order in engine.orders("saves")) == 4, "those of the tokens"


def test_what_the_store_lost_is_not_saved_again_once_a_mixed_prompt_came(engine: RealEngine) -> None:
    """vLLM's cache may have the mixed prompt's block under that name."""
    request = engine.add("alone", None, prompt_embeds=ROWS)
    names = [digest + b"\0" for digest in request.block_hashes[:2]]
    engine.stage("alone", 0)
    engine.finish()
    for saved in (4, 4):
        records, told = len(engine.daemon.saved), b"".join(names).hex()
        engine.link.absent.append(
            Absent(epoch=1, reset_generation=0, saved_records=records, name_bytes=len(names[0]), names=told)
        )
        engine.finish()
        assert sum(len(order.block_ids) for order in engine.orders("saves")) == saved
        engine.add("mixed", [0] * TOKENS, **mixed(token_at=3))
        engine.finish()


@pytest.mark.parametrize("how", ["preempted", "left"])
def test_a_prompt_of_embeddings_is_not_saved_from_blocks_of_a_mixed_one(how: str) -> None:
    """It began before that one came, and has its blocks by their names later."""
    engine = Engine(credits=range(8) if how == "preempted" else ())
    request = engine.admitted("alone", 2 * BLOCK, prompt_embeds=ROWS)
    assert len(engine.step([(request, BLOCK)]).saves) == (how == "preempted")
    if how == "left":
        engine.side.finished(request, [[100, 101]])
        engine.cache.names[100] = request.names(0, 1)[0]
    engine.add("mixed", 2 * BLOCK, prompt_is_token_ids=[True, False])
    if how == "preempted":
        engine.preempt(request)
        engine.cache.hits["alone"] = BLOCK
        engine.admit(request)
        assert engine.step([(request, BLOCK)]).saves == []
    else:
        engine.daemon.credits.grant([1, 2])
        assert engine.step([(engine.admitted("other", 2), 2)]).saves == []


def test_a_prompt_of_embeddings_that_ends_after_a_mixed_one_came_leaves_nothing() -> None:
    engine = Engine()
    request = engine.admitted("alone", 2 * BLOCK, prompt_embeds=ROWS)
    assert engine.step([(request, BLOCK)]).saves == []
    engine.add("mixed", 2 * BLOCK, prompt_is_token_ids=[True, False])
    engine.side.finished(request, [[100, 101]])
    assert not engine.side.saves.left
