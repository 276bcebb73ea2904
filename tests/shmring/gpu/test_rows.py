"""`make gpu` says of each test what became of it, also of those that end their process or take too long."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TESTS = """
import os, pytest, time

def test_good(record_property):
    record_property("rate", "7 GB/s")

def test_bad():
    assert 1 == 2

@pytest.mark.skip(reason="no second GPU")
def test_other(): ...
"""


@pytest.mark.parametrize(
    ("tests", "minutes", "status", "rows"),
    [
        (
            TESTS,
            1,
            1,
            {"pass": "::test_good", "measured": "rate: 7 GB/s", "fail": "::test_bad", "skip": ": no second GPU"},
        ),
        ("def test_good(): ...", 1, 0, {"pass": "::test_good"}),
        ("import os\ndef test_that_dies(): os.abort()", 1, 1, {"fail": "ended by signal 6"}),
        ("import time\ndef test_that_hangs(): time.sleep(60)", 0.05, 1, {"fail": "no time left, after"}),
        ("import nothing_of_this_name", 1, 1, {"fail": "(import)"}),
    ],
    ids=["of each kind", "all passed", "a crash", "a hang", "no import"],
)
def test_each_test_has_its_row(tmp_path: Path, tests: str, minutes: float, status: int, rows: dict[str, str]) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(tests)
    command = [sys.executable, "-m", "tests.gpu", "--fake", "--minutes", str(minutes), str(file)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=120, check=False)
    said = done.stdout.splitlines()
    for what, text in rows.items():
        assert any(line.startswith(what) and text in line for line in said), done
    assert (done.returncode, said[-1].startswith("make gpu: all passed")) == (status, status == 0), done
