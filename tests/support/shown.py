"""What tests show of vLLM's releases: their results, kept in docs/reference/compatibility, and the page's table.

A test says it by a marker: `@pytest.mark.shows("preemption", "MLA")`, or with `refused=True`.  A run with `--record`
keeps the results of such tests in a file for each vLLM, and writes the table.  Only a test that passed is kept.

`.venv/bin/python -m tests.support.shown` writes the table from the files.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference" / "compatibility"
PAGE = FOLDER.with_suffix(".md")

# In the table's order. A test may name no others.
FAMILIES = (
    "full attention",
    "MLA",
    "full attention and sliding windows",
    "full attention and chunks",
    "full attention, sliding windows and chunks",
    "compressed MLA and sliding windows (DeepSeek-V4)",
    "sliding windows alone",
    "Mamba",
    "full attention and Mamba",
    "full attention, sliding windows and Mamba",
    "full attention and linear attention",
    "encoder-decoder",
)
FEATURES = (
    "saved, then loaded: tokens equal",
    "`--disable-hybrid-kv-cache-manager`",
    "warmed prompts",
    "prompts of every length, chunked prefill",
    "preemption",
    "aborts",
    "loads that fail",
    "reset of the connector",
    "queues longer than staging",
    "random schedules, `Scheduler` and `AsyncScheduler`",
    "streaming sessions",
    "daemon that stops, hangs and comes back",
    "upgrade of the daemon",
    "killed engines and workers",
    "store that hangs or dies",
    "values with a page that a disk lost",
    "device cache",
    "producers and consumers",
    "`mode` shadow",
    "KV events, sources of hits",
    "KV events",
    "LoRA",
    "FP8 KV",
    "n-gram drafts",
    "EAGLE drafts",
    "two tensor-parallel ranks",
    "data-parallel ranks on two nodes",
    "ranks that Ray started on one node",
    "child of MultiConnector",
    "prefill/decode, beside a peer-to-peer connector",
    "one release loads what another stored",
    "engines with other KV share nothing",
    "vLLM's own connector reads ours, and the reverse",
    "ranks on another node",
    "external launcher",
    "pipeline stages, Ray's older executor",
    "decode context parallelism",
    "prefill context parallelism",
    "prefix caching off",
    "sleep mode",
    "`--enable-fault-tolerance`",
    "routed experts in the output",
    "HiSparse",
    "KV scales per token and head, `--enforce-eager`",
)
LEVELS = ("run end to end", "run at scheduler level", "refused")
# Words of the page's table, which explains them.
WORDS = dict(zip(("", *LEVELS), ("–", "engines", "scheduler", "refused"), strict=True))


@dataclass(frozen=True, order=True)
class Shown:
    """One thing that a test showed. `test`: its file and function."""

    family: str
    feature: str
    level: str
    test: str

    def of(self, feature: str, family: str) -> bool:
        return (self.feature, self.family) == (feature, family)

    def stale(self) -> bool:
        """Whether the test no longer exists, or no longer says this."""
        file, _, name = self.test.partition("::")
        return (name, self.feature, self.family, self.level == "refused") not in said(ROOT / file)


def table() -> str:
    """Return the page's table: feature and family by series. Raises ValueError for a cell both refused and run."""
    recorded = {path.stem: load(path) for path in FOLDER.glob("*.json")}
    series = sorted(recorded, key=lambda name: [int(part) for part in name.split(".")])
    lines = [f"| feature | models | {' | '.join(series)} |", "| --- " * (2 + len(series)) + "|"]
    for feature in FEATURES:
        for family in FAMILIES:
            found = {one: {each.level for each in recorded[one] if each.of(feature, family)} for one in series}
            cells = [_cell(found[one]) for one in series]
            if any(cells):
                lines.append(f"| {feature} | {family} | {' | '.join(WORDS[cell] for cell in cells)} |")
    return "\n".join(lines) + "\n"


def write_table() -> None:
    """Put the table into the page."""
    before, _, rest = PAGE.read_text().partition("| feature | models |")
    PAGE.write_text(before + table() + "\n" + rest.partition("\n\n")[2])


def _cell(levels: set[str]) -> str:
    if len(levels) > 1 and "refused" in levels:
        raise ValueError(f"refused, and run: {sorted(levels)}")
    return next((level for level in LEVELS if level in levels), "")


def load(path: Path) -> set[Shown]:
    return {Shown(**each) for each in json.loads(path.read_text())} if path.exists() else set()


@functools.cache
def said(path: Path) -> set[tuple[str, str, str, bool]]:
    """(test, feature, family, refused) of each marker in a file, without importing it. ValueError: no literal."""
    if not path.exists():
        return set()
    tree = ast.parse(path.read_text())
    whole_file = [words for each in tree.body if isinstance(each, ast.Assign) for words in _markers(each)]
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    return {
        (each.name, *words)
        for each in functions
        for words in (*whole_file, *(one for decorator in each.decorator_list for one in _markers(decorator)))
    }


def _markers(tree: ast.AST) -> Iterator[tuple[str, str, bool]]:
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.shows":
            yield _arguments(
                *(ast.literal_eval(each) for each in call.args),
                **{str(each.arg): ast.literal_eval(each.value) for each in call.keywords},
            )


def _arguments(feature: str, family: str = FAMILIES[0], *, refused: bool = False) -> tuple[str, str, bool]:
    """The marker's parameters."""
    if feature not in FEATURES or family not in FAMILIES:
        raise pytest.UsageError(f"not in the lists of tests/support/shown.py: {feature=} {family=}")
    return feature, family, refused


def shown_by(item: pytest.Item) -> list[Shown]:
    """Return what a test shows if it passes. Raises pytest.UsageError for a word that is not in the lists."""
    test = f"{item.path.relative_to(ROOT).as_posix()}::{getattr(item, 'originalname', item.name)}"
    run = LEVELS[0] if item.get_closest_marker("e2e") else LEVELS[1]
    found = []
    for marker in item.iter_markers("shows"):
        feature, family, refused = _arguments(*marker.args, **marker.kwargs)
        found.append(Shown(family, feature, LEVELS[2] if refused else run, test))
    return found


class Recorder:
    """A pytest plugin. With xdist it runs in the controller, which reads `user_properties`."""

    def __init__(self) -> None:
        self._passed: set[Shown] = set()
        self._failed: set[Shown] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "shows" and report.failed:
                self._failed.add(Shown(*value))
            elif name == "shows" and report.passed and report.when == "call":
                self._passed.add(Shown(*value))

    def pytest_sessionfinish(self) -> None:
        if not self._passed | self._failed:
            return
        path = FOLDER / f"{_series()}.json"
        kept = {each for each in load(path) if not each.stale()}
        rows = sorted((kept | self._passed) - self._failed)
        path.parent.mkdir(exist_ok=True)
        path.write_text("[\n" + ",\n".join(json.dumps(asdict(each)) for each in rows) + "\n]\n")
        write_table()


def _series() -> str:
    """The series of the installed vLLM, which the controller need not import."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    text = Path(spec.submodule_search_locations[0], "_version.py").read_text()
    [found] = re.findall(r"^__version__ = .*?'(\d+\.\d+)\.", text, re.MULTILINE)
    return str(found)


if __name__ == "__main__":
    write_table()
