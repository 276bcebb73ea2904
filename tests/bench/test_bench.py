"""One piece, run for real and as short as can be: engines, daemon, store, link, and the page that comes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.bench import page
from tests.lab.link import available
from tests.lab.process import REPO

pytestmark = [pytest.mark.e2e, pytest.mark.store, pytest.mark.vllm, pytest.mark.stress]


@pytest.mark.parametrize("far", ["link", "disk"])
def test_a_piece_runs_and_its_page_can_be_made(tmp_path: Path, far: str) -> None:
    """All variants serve all requests with equal tokens; ours fetched what it loaded, over the link if there is one."""
    if far == "link" and (why_not := available()) is not None:
        pytest.skip(f"no limited link: {why_not}")
    argv = [
        *("pool", "--quick", "--points", "1"),
        "--variants",
        "local,recomputed,upstream-async,kvprefetch-wait",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench", *argv, *(["--disk"] if far == "disk" else [])],
        cwd=REPO,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "pool.json").read_text())
    ran = ["local", "recomputed", *(["upstream-async"] if far == "link" else []), "kvprefetch-wait"]
    assert page.variants_of(result) == ran
    assert result["problems"] == []
    assert result["tokens"]["compared"] > 0
    for point in result["points"]:
        loaded = point["setting"]["requests"] * 1472 * 2048
        for each in point["passes"]:
            assert len(each["requests"]["prompt"]) == point["setting"]["requests"]
            if each["variant"] == "kvprefetch-wait":
                assert sum(each["daemon"]["fetched_bytes"]) == loaded
            if far == "link" and each["variant"] in ("upstream-async", "kvprefetch-wait"):
                assert each["link_bytes"] >= loaded
    assert "kvprefetch-wait against upstream-async" in "\n".join(page.section(result)) or far == "disk"


def test_a_piece_with_modelled_time_runs_and_its_page_can_be_made(tmp_path: Path) -> None:
    """All variants serve the same arrivals with equal tokens and no wrong block; local is the preset's time."""
    if why_not := available():
        pytest.skip(f"no limited link: {why_not}")
    argv = [
        *("load-50-10", "--points", "0.3", "--requests", "24", "--rounds", "1", "--variants"),
        "local,upstream-async,kvprefetch",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.served", *argv, "--out", str(tmp_path)],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "load-50-10.json").read_text())
    assert (result["problems"], result["tokens"]) == ([], {"compared": 48, "different": {}})
    passes = {each["variant"]: each for each in result["points"][0]["passes"]}
    assert {each["counts"]["wrong_blocks"] for each in passes.values()} == {0}
    assert passes["local"]["counts"]["between_s"] == pytest.approx(0.05, rel=0.05)
    assert set(passes["upstream-async"]["requests"]["cached_tokens"]) == {1984}
    assert passes["upstream-async"]["counts"]["steps_waited"] > passes["local"]["counts"]["steps_waited"] + 1
    assert "| 25 : 19.8 : 50 ms | kvprefetch |" in report.details([result], "2026-11-29")
