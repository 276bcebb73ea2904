"""The demo's arithmetic and its words; tests/test_empty_root.py runs it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import demo, far_store
from benchmarks.far_store import FarStore, Load
from tests.lab import process
from tests.lab.engine import EngineError
from tests.lab.passes import RequestResult


def served(name: str, *ttft_s: float) -> demo.Way:
    requests = [RequestResult(at, str(at), [at], 7, 1.0, 1.0 + ttft, 9.0, "length") for at, ttft in enumerate(ttft_s)]
    return demo.Way(name, requests)


WAYS = [served("recomputed", 2.0, 4.0, 6.0), served("kvprefetch", 1.0, 2.0, 4.5), served("all local", 0.1, 0.2, 0.3)]


def test_each_way_has_a_row() -> None:
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as shown:
        console.print(demo.table(WAYS))
    rows = [line.split() for line in shown.get().splitlines()]
    assert [row[0] for row in rows[1:]] == ["recomputed", "kvprefetch", "all"]
    assert rows[2][1:7] == ["2.000", "s", "2.500", "s", "4.450", "s"]
    assert rows[1][7].startswith("█"), "the longest bar is full"


def test_the_verdict_leaves_the_ideal_out() -> None:
    assert demo.verdict(WAYS) == ["kvprefetch against recomputed: mean -38%, median -50%"]


def test_a_timeline_is_in_the_order_of_time() -> None:
    lines = demo.timeline({"claimed_ms": 90.0, "hint_seen_ms": 0.5, "last_byte_ms": 70.25, "hidden_fraction": 0.75})
    assert [line.split()[0] for line in lines] == ["0.0", "0.5", "70.2", "90.0", "75.0"]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    demo.picture(WAYS, tmp_path / "new" / "demo.png", "a note")
    assert (tmp_path / "new" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_rounds_share_out_all_requests() -> None:
    load = Load()
    parts = [load.of_round(number, range(load.requests)) for number in range(load.rounds)]
    assert sorted(each for part in parts for each in part) == list(range(load.requests))
    assert {len(part) for part in parts} == {load.requests // load.rounds}


def test_no_request_s_kv_is_staged_before_its_round(tmp_path: Path) -> None:
    far = FarStore(Load(), tmp_path, lambda _: None)
    assert len(far.prompts) == far.load.requests
    assert not {tuple(each) for each in far.prompts} & {tuple(each) for each in far.warm_up}


def test_it_says_that_an_engine_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    @contextlib.contextmanager
    def failing(_: FarStore):  # type: ignore[no-untyped-def]
        raise EngineError("no answer in time")
        yield

    monkeypatch.setattr(process, "exit_on_sigterm", lambda: None)
    monkeypatch.setattr(far_store.FarStore, "started", failing)
    assert demo.main([]) == 1
    assert capsys.readouterr().err == "demo: an engine failed: no answer in time\n"
