"""pytest's output for `make gpu`: a row for each test, pass, skip or fail, and a row for each figure that it measured.

Loaded by `-p tests.gpu.rows` in the place of pytest's own output.
"""

from __future__ import annotations

import pytest

ENDS = 40  # lines of a failure


def row(what: str, seconds: float | None, text: str) -> None:
    print(f"{what:<8}{'' if seconds is None else f'{seconds:.1f} s':>8}  {text}", flush=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome == "skipped":
        _, _, reason = report.longrepr if isinstance(report.longrepr, tuple) else ("", "", str(report.longrepr))
        row("skip", None, f"{report.nodeid}: {reason.removeprefix('Skipped: ')}")
    elif report.outcome == "failed":
        row("fail", report.duration, report.nodeid + ("" if report.when == "call" else f" ({report.when})"))
        print("".join(f"    {line}\n" for line in report.longreprtext.splitlines()[-ENDS:]), end="")
    elif report.when == "call":
        row("pass", report.duration, report.nodeid)
    if report.when == "teardown":
        for name, value in report.user_properties:
            row("measured", None, f"{name}: {value}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        row("fail", None, f"{report.nodeid} (import)")
        print("".join(f"    {line}\n" for line in report.longreprtext.splitlines()[-ENDS:]), end="")
