"""Prompts of embeddings: loaded and saved where their hashes name their KV, left alone where vLLM's hashes do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests.connector.fakes import BLOCK  # noqa: E402
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
