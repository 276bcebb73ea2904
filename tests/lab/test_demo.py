"""The demo's arithmetic and its words; tests/test_empty_root.py runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo
from benchmarks.bench.runner import Runner
from benchmarks.bench.served import Requests, Served
from tests.lab import link, process
from tests.lab.engine import EngineError


def served(variant: str, *ttft_s: float) -> demo.Way:
    return demo.Way(variant, list(ttft_s), [7] * len(ttft_s))


def passed(variant: str, of: int, *ttft_s: float) -> dict[str, Any]:
    """A pass as a result keeps it: a request arrives each second."""
    at = [float(each) for each in range(len(ttft_s))]
    firsts = [arrived + ttft for arrived, ttft in zip(at, ttft_s, strict=True)]
    columns = Requests(list(range(len(at))), at, firsts, firsts, [7] * len(at), [])
    return {"variant": variant, "round": of, "set": of, **Served(columns, total_s=1.0).kept()}


RESULT: dict[str, Any] = {
    "points": [
        {
            "pace": {"place_s": 0.5, "step_s": 0.005, "fetch_s": 0.2},
            "passes": [
                *(passed("recomputed", 0, 2.0, 4.0), passed("kvprefetch", 0, 1.0, 2.0), passed("local", 0, 0.1, 0.2)),
                *(passed("recomputed", 1, 6.0), passed("kvprefetch", 1, 4.5), passed("local", 1, 0.3)),
            ],
        }
    ],
    "tokens": {"compared": 4, "different": {}},
}


def test_the_verdict_names_each_figure_that_is_not_ahead() -> None:
    """A median that is ahead does not make up for a mean that is not."""
    assert demo.verdict([served("upstream-async", 2.0, 3.0, 3.0), served("kvprefetch", 1.0, 2.0, 6.0)]) == [
        "kvprefetch against vLLM's Mooncake connector: median -33%, mean +12%",
        "kvprefetch is NOT ahead of: mean of vLLM's Mooncake connector.",
    ]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No signal handler, a limited link that could be made, and a result without engines."""

    def run(self: Runner, make_bed: object) -> None:
        self.result |= RESULT

    monkeypatch.setattr(process, "exit_on_sigterm", lambda: None)
    monkeypatch.setattr(link, "available", lambda: None)
    monkeypatch.setattr(Runner, "run", run)
    return monkeypatch


def test_it_ends_with_the_verdict(
    at_once: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--json", str(tmp_path / "a.json")]) == 0
    said = capsys.readouterr().out
    assert "kvprefetch is ahead of all of them, at the median and in the mean.\n" in said
    assert said.endswith("All ways gave the same tokens.\n")
    assert (tmp_path / "a.json").read_text().startswith('{"rounds":')


def test_other_tokens_fail_it(at_once: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    at_once.setitem(RESULT, "tokens", {"compared": 4, "different": {"kvprefetch": 1}})
    assert demo.main([]) == 1
    assert capsys.readouterr().out.endswith("FAILED: other tokens than recomputed: kvprefetch\n")


def test_without_a_link_the_store_is_a_slow_disk(
    at_once: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    far = []
    measure = demo.measure
    at_once.setattr(demo, "measure", lambda load, *rest: (far.append(load.far), measure(load, *rest))[1])
    at_once.setattr(link, "available", lambda: "not root")
    assert demo.main([]) == 0
    assert far == ["disk"]
    assert "no limited link here: not root\n" in capsys.readouterr().out


def test_it_says_that_an_engine_failed(at_once: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(self: Runner, make_bed: object) -> None:
        raise EngineError("no answer in time")

    at_once.setattr(Runner, "run", failing)
    assert demo.main([]) == 1
    assert capsys.readouterr().err == "demo: no answer in time\n"
