"""Tokens never change when a LoRA adapter is replaced at its path; the same adapter is shared between engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Site, hits, served
from tests.lab.adapter import make_adapter
from tests.lab.engine import Engine, EngineSpec
from tests.lab.prompts import make_prompts

PROMPTS = make_prompts(4, 300, seed=72)
WARM = make_prompts(1, 40, seed=73)  # a step in which the ranks read an adapter
LORA = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 8}


@pytest.mark.shows("LoRA")
def test_a_replaced_adapter_is_another_and_an_unchanged_one_is_shared(
    site: Site, engines: Callable[..., Engine], tmp_path: Path
) -> None:
    """Replaced before a start, and beside a running engine that reads it again.

    tests/connector/test_adapter_reads.py has other target modules.
    """
    path = tmp_path / "sql"
    options: dict[str, Any] = {"lora": ["sql", 1, make_adapter(path, 0)]}
    other = {"lora": ["other", 2, make_adapter(tmp_path / "other", 9)]}
    plain = engines(EngineSpec(model=site.model, extra=LORA))
    right = []
    for seed in range(4):
        make_adapter(path, seed)
        right.append(plain.run(PROMPTS, request_options=options).tokens)
        plain.reset_prefix_cache()
        plain.run(WARM, request_options=other)  # has room for one adapter: it reads the first one again
    assert all(len({tuple(each[i]) for each in right}) == 4 for i in range(len(PROMPTS)))
    plain.stop()

    def start() -> Engine:
        engine = site.engine(site.spec(extra={"cache_prefix": "replaced"}).but(extra=LORA))
        engine.run(WARM, request_options=options)
        return engine

    make_adapter(path, 0)
    first = start()
    served(first.run(PROMPTS, request_options=options), right[0], [0] * len(PROMPTS))
    site.assert_idle()
    first.stop()
    second = start()
    before = len(site.daemon.records("request.done"))
    served(second.run(PROMPTS, request_options=options), right[0], hits(PROMPTS))
    site.assert_idle()
    loaded = [line for line in site.daemon.records("request.done")[before:] if line["outcome"] == "loaded"]
    assert [line["adopted_ms"] is None for line in loaded] == [False] * len(PROMPTS), "not hinted early"
    second.stop()

    make_adapter(path, 1)
    third = start()
    served(third.run(PROMPTS, request_options=options), right[1], [0] * len(PROMPTS))
    site.fresh(third)
    served(third.run(PROMPTS, request_options=options), right[1], hits(PROMPTS))
    make_adapter(path, 2)
    site.fresh(third)
    served(third.run(PROMPTS, request_options=options), right[1], hits(PROMPTS))  # vLLM has the one before in memory
    third.run(WARM, request_options=other)
    site.fresh(third)
    served(third.run(PROMPTS, request_options=options), right[2])
    site.fresh(third)
    served(third.run(PROMPTS, request_options=options), right[2], [0] * len(PROMPTS))
    assert third.log.read_text().count("adapter 'sql' is not shared until the next reset") == 1
    assert third.reset_prefix_cache(reset_connector=True)
    served(third.run(PROMPTS, request_options=options), right[2], [0] * len(PROMPTS))
    site.fresh(third)
    served(third.run(PROMPTS, request_options=options), right[2], hits(PROMPTS))
    make_adapter(path, 3)
    site.fresh(third)
    in_place = {"lora": [*options["lora"], True]}
    served(third.run(PROMPTS, request_options=in_place), right[3])
    site.assert_idle()
    third.stop()
