"""vLLM's own connector does on the bed what it does on vLLM's CPU engine: one scenario in both, compared."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import connectors
from tests.lab.bed import engine as bed
from tests.lab.checkpoint import make_checkpoint
from tests.lab.engine import Engine, EngineSpec
from tests.lab.process import REPO
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.lab.template import Template

pytestmark = [pytest.mark.e2e, pytest.mark.store, pytest.mark.vllm]
BLOCK, PAUSE_S = 32, 0.15
STORED = make_prompts(3, 300, seed=5)
NEW = make_prompts(2, 200, seed=6)
# All of a prompt is stored, nothing, a part; two run at a time.
ASKED = [STORED[0], NEW[0], STORED[1][:170] + NEW[1], STORED[2], NEW[1]]
OUTPUTS = [6, 3, 5, 4, 3]


def watch(engine: Any) -> None:
    """In the engine's process: note from now on what each pass of the scheduler asks, loads and computes.

    Before each pass all that runs beside gets the time to end, so that a fast engine and a slow one see the same.
    """
    core = engine.engine_core.engine_core
    scheduler, connector = core.scheduler, core.scheduler.connector
    schedule, match = scheduler.schedule, connector.get_num_new_matched_tokens
    allocated = connector.update_state_after_alloc
    core.watched = passes = list[dict[str, Any]]()

    def name(request_id: str) -> str:
        found = re.search(r"-(\d+)-", f"{request_id}-")
        assert found is not None
        return found.group(1)

    def matched(request: Any, computed: int) -> Any:
        answer = match(request, computed)
        passes[-1].setdefault("asked", []).append([name(request.request_id), computed, *answer])
        return answer

    def after(request: Any, blocks: Any, external: int) -> None:
        if external:
            passes[-1].setdefault("loads", []).append([name(request.request_id), external, blocks.get_block_ids()])
        allocated(request, blocks, external)

    def scheduled(*arguments: Any, **options: Any) -> Any:
        time.sleep(PAUSE_S)
        passes.append({})
        output = schedule(*arguments, **options)
        if output.num_scheduled_tokens:
            passes[-1]["computes"] = {name(each): count for each, count in output.num_scheduled_tokens.items()}
        return output

    connector.get_num_new_matched_tokens, connector.update_state_after_alloc = matched, after
    scheduler.schedule = scheduled


def watched(engine: Any) -> list[dict[str, Any]]:
    """In the engine's process: the passes in which something happened."""
    return [each for each in engine.engine_core.engine_core.watched if each]


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with Template(bed.spec().environment()) as started:
        yield started


def passes(spec: EngineSpec, template: Template) -> list[dict[str, Any]]:
    """Store some prompts, forget them, and ask for these and others."""
    with Store() as store, Engine(spec.but(mooncake_config=store.config), template=template) as engine:
        engine.run(STORED, max_tokens=1)
        count = sum(len(each) // BLOCK for each in STORED)
        assert store.wait_keys(count) == count
        assert engine.reset_prefix_cache()
        engine.call("tests.bed.test_alike:watch")
        assert engine.run(ASKED, max_tokens=OUTPUTS).cached_tokens == [288, 0, 160, 288, 0]
        found: list[dict[str, Any]] = engine.call("tests.bed.test_alike:watched")
        return found


def test_upstream_loads_the_same_blocks_in_the_same_pass_as_on_a_cpu_engine(template: Template) -> None:
    model: Path = make_checkpoint(REPO / "build" / "checkpoints")
    transfer = connectors.upstream(lookup_async=True)
    common: dict[str, Any] = {"block_size": BLOCK, "max_num_seqs": 2, "num_gpu_blocks": 200}
    computed = passes(EngineSpec(model=model, kv_transfer=transfer, **common), template)
    paced = passes(bed.spec(model=model, connector=transfer, scheduling="sync", runner="v1", **common), template)
    assert sum(len(each.get("loads", ())) for each in computed) == 3
    assert paced == computed
