"""Engines of the bed that are served: requests come during a step, and the device's time is the preset's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.bed import engine as bed
from tests.lab.bed import oracle
from tests.lab.bed.timeline import PRESETS
from tests.lab.engine import Engine
from tests.lab.prompts import make_prompts
from tests.lab.template import Template

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]
PRESET = PRESETS["50-10"].sized(2048)
STEP_S, VOCAB = 0.05, 2048
PROMPTS = make_prompts(3, 300, vocab=VOCAB)
OUTPUTS = [24, 8, 8]


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with Template(bed.spec().environment()) as started:
        yield started


@pytest.mark.parametrize("child", ["served", pytest.param("http", marks=pytest.mark.stress)])
def test_requests_that_come_during_steps_get_the_tokens_of_their_prompts(template: Template, child: str) -> None:
    """A token comes with each step; a request waits for the step under way and one more, and keeps nobody waiting."""
    with Engine(bed.spec(preset=PRESET).but(child=f"tests.lab.bed.{child}"), template=template) as engine:
        engine.call("tests.lab.bed.worker:clock", False)
        engine.run(PROMPTS, max_tokens=1)
        engine.call("tests.lab.bed.worker:clock", True)
        served = engine.run(PROMPTS, max_tokens=OUTPUTS, arrivals_s=[0.0, 0.31, 0.58])
        assert served.tokens == [oracle.answer(prompt, n, VOCAB) for prompt, n in zip(PROMPTS, OUTPUTS, strict=True)]
        assert served.cached_tokens == [288] * 3
        first, *others = served.requests
        gaps_s = [after - before for before, after in zip(first.token_s, first.token_s[1:], strict=False)]
        assert statistics.median(gaps_s) == pytest.approx(STEP_S, abs=0.01)
        assert min(each.ttft_s for each in others) > STEP_S, "computed in a step of its own, behind the one under way"
        (report,) = bed.report(engine, reset=True)
        assert report["faults"] == []
        assert report["timeline"]["steps"] == len(report["timeline"]["begun_ns"]) >= max(OUTPUTS)
        assert len(report["timeline"]["admitted"]) == 3
        assert engine.reset_prefix_cache()
        assert engine.run(PROMPTS[:1], max_tokens=1).cached_tokens == [0]


def test_data_parallel_ranks_step_together(template: Template) -> None:
    """Of a model with experts: a rank without a request takes part in the other one's steps."""
    small: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks": 60, "extra": {"data_parallel_size": 2}}
    spec = bed.spec(layout="chunks", preset=PRESET, **small)
    with Engine(spec.but(child="tests.lab.bed.served"), template=template) as engine:
        served = engine.run(PROMPTS, max_tokens=[3, 12, 8], arrivals_s=[0.0, 0.3, 0.6])
        assert served.tokens == [oracle.answer(prompt, n, VOCAB) for prompt, n in zip(PROMPTS, [3, 12, 8], strict=True)]
        (report,) = bed.report(engine)
        assert report["idle_steps"] > 3
        assert report["faults"] == []
