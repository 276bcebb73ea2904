"""What `make bench-ttft` refuses before it starts anything, and what it makes of several starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import ttft
from benchmarks.ttft import Figures
from tests.lab import lmcache
from tests.lab.passes import Pass, RequestResult


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="2"):
        ttft.main(arguments)
    return capsys.readouterr().err.splitlines()[-1]


def test_lmcache_is_no_variant_without_its_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is it run by default: the choices of the message are what a default run has."""
    said = refusal(["--variants", "local,lmcache"], capsys)
    assert said.endswith("unknown variants ['lmcache']: choose from local,recompute,upstream-sync,upstream-async,ours")


@pytest.mark.vllm
def test_an_interpreter_without_lmcache_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One line says what it lacks; so does one that is not there."""
    (tmp_path / "redis-server").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal(["--lmcache-python", sys.executable], capsys).endswith(f"{sys.executable} lacks ['lmcache']")
    assert "No such file or directory: '/nowhere'" in refusal(["--lmcache-python", "/nowhere"], capsys)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "redis-server is not installed" in refusal(["--lmcache-python", sys.executable], capsys)


def test_an_interpreter_whose_packages_hide_ours_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its engines could not import `tests.lab`: an installed package wins over a folder without `__init__.py`."""
    (tmp_path / "redis-server").touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    packages = tmp_path / "packages"
    for name in ("lmcache", "vllm", "tests"):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncd / && PYTHONPATH={packages} exec {sys.executable} -S "$2" "$3"\n')
    python.chmod(0o755)
    assert refusal(["--lmcache-python", str(python)], capsys).endswith("hides ours: pip uninstall cufile-python")
    (packages / "tests" / "__init__.py").unlink()
    (packages / "tests").rmdir()
    assert lmcache.missing(python) is None


class PlayedBench:
    """Starts nothing: gives passes of two requests, in each start at another pace and with another ratio."""

    LOCAL_S = (1.0, 1.0, 4.0)
    RATIOS = (1.0, 1.2, 1.1)

    def __init__(self, orders: list[list[str]]) -> None:
        self.orders = orders
        self.tokens: dict[str, list[list[int]]] = {}
        self.link = None

    def run(self, variants: list[str], rounds: int, figures: dict[str, Figures], start: int) -> None:
        self.orders.append(variants)
        for variant in variants:
            local_s = self.LOCAL_S[start - 1]
            first_s = local_s if variant == "local" else local_s * self.RATIOS[start - 1]
            self.tokens[variant] = [[1], [start if variant == "ours" else 2]]
            requests = [RequestResult(i, str(i), [1], 1472, 0.0, first_s, first_s, "length") for i in range(2)]
            for _ in range(rounds):
                each = figures[variant]
                each.add(start, Pass(requests, first_s, steps=1), 1472, 0.0)
                each.engine_cpu_s.append(1.0)
                each.other_cpu_s.append(1.0)


def test_starts_alternate_and_each_has_a_ratio_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A start is compared with its own ideal: of the medians over all rounds, the ratio would be 1.20."""
    orders: list[list[str]] = []
    monkeypatch.setattr(ttft, "Bench", lambda *_: PlayedBench(orders))
    monkeypatch.setattr(ttft, "make_checkpoint", lambda *_: tmp_path)
    monkeypatch.setattr(ttft, "exit_on_sigterm", lambda: None)
    variants, written = ["local", "upstream-async", "ours"], tmp_path / "ttft.json"
    arguments = ["--variants", ",".join(variants), "--rounds", "2", "--starts", "3", "--json", str(written)]
    assert ttft.main(arguments) == 0
    assert orders == [variants, variants[::-1], variants]
    lines = capsys.readouterr().out.splitlines()
    assert "start 2 of 3: ours upstream-async local" in lines
    first, second, _ = (line.split() for line in lines if line.startswith("ours"))
    assert first[1:4] == ["1.200", "(1.000-4.400)", "1.10"]
    assert second[1:3] == ["1.10", "(1.00-1.20)"]
    assert second[-1] == "3"
    assert "tokens of ours equal those of upstream-async in 4 of 6 requests" in lines
    report = json.loads(written.read_text())
    assert report["starts"] == 3
    assert report["variants"]["ours"]["start"] == [1, 1, 2, 2, 3, 3]
    assert report["ratios"]["ours"]["p50"] == pytest.approx(PlayedBench.RATIOS)


def test_one_start_is_the_default_and_none_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert refusal(["--starts", "0"], capsys).endswith("--starts must be at least 1, not 0")
    monkeypatch.setattr(ttft, "Bench", lambda *_: PlayedBench([]))
    monkeypatch.setattr(ttft, "make_checkpoint", lambda *_: tmp_path)
    monkeypatch.setattr(ttft, "exit_on_sigterm", lambda: None)
    assert ttft.main(["--variants", "local,ours", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("ours") and "(1.000-1.000)" in line]) == 1
    assert not [line for line in lines if "of starts" in line]
