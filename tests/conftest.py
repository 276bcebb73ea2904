"""What all tests share: the record of what they show, the order of files, and files that lack a package."""

import contextlib
import gc
import inspect
import os
import re
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import astuple
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import shown

# Packages of `make setup` that `make check` does without.
FROM_SETUP = {"matplotlib", "mooncake", "safetensors", "tokenizers", "torch", "transformers", "vllm"}

# Of `<X object at 0x7f…>`: the text of an object without one of its own.
ADDRESS = re.compile(r" at 0x[0-9a-f]+")

# How long an example takes says nothing on a busy machine.  Machines with a GPU may lack hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("tests", deadline=None)
    settings.load_profile("tests")

# A shell's background job ignores SIGINT, and what it starts inherits that; tests interrupt what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# A user's own daemon may run here.  What tests start without options has files and a port of its own.
RUNTIME = tempfile.TemporaryDirectory(prefix="kvt-")
os.environ |= {f"XDG_{each}": f"{RUNTIME.name}" for each in ("RUNTIME_DIR", "DATA_HOME", "STATE_HOME")}
os.environ["KVPREFETCHD_SOCKET"] = f"{RUNTIME.name}/kvprefetchd.sock"
os.environ["KVPREFETCHD_METRICS_PORT"] = "0"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="keep what tests show in docs/reference/compatibility")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record"):
        config.pluginmanager.register(shown.Recorder())


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file that needs what only `make setup` installs, where it is not installed.

    Refuse names with addresses: test processes would not agree on the tests, and pytest-xdist would say no more.
    """
    report = yield
    if unlike := [each.nodeid for each in report.result or () if ADDRESS.search(each.nodeid)]:
        report.outcome, report.result = "failed", []
        report.longrepr = "\n".join(["These names differ between test processes; give them ids:", *unlike])
    if report.failed and (absent := lacks(str(report.longrepr))):
        report.outcome = "skipped"
        name = ".".join(collector.path.relative_to(collector.config.rootpath).with_suffix("").parts)
        sys.modules.pop(name, None)  # half of it; another file may import from it
        report.longrepr = (str(collector.path), 0, absent)
    return report


def lacks(failure: str) -> str:
    """Return the reason to skip what failed so for want of a package that `make setup` installs; empty for others."""
    absent = re.search(r"^(?:E +)?ModuleNotFoundError: No module named '(\w+)", failure, re.MULTILINE)
    absent = absent or re.search(
        r"^(?:E +)?kvprefetchd: store: (mooncake)_master is not installed", failure, re.MULTILINE
    )
    if absent and absent[1] in FROM_SETUP and find_spec(absent[1]) is None:
        return f"Skipped: {absent[1]} is not installed (make setup)"
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that imports such a package as it runs. One that fails says in words what it expected."""
    report = yield
    if report.failed and (absent := lacks(str(report.longrepr))):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, absent)
    elif report.failed and isinstance(item, pytest.Function):
        name = item.originalname.removeprefix("test_").replace("_", " ")
        report.sections.insert(0, ("expected", f"{name}\n{inspect.cleandoc(item.function.__doc__ or '')}".rstrip()))
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that starts a store or an engine where only `make setup` would have installed that."""
    for marker, package in (("store", "mooncake"), ("vllm", "vllm"), ("e2e", "vllm")):
        if item.get_closest_marker(marker) and find_spec(package) is None:
            pytest.skip(f"{package} is not installed (make setup)")


@pytest.fixture(autouse=True)
def _no_fault_is_contained(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Faults that an epoch in this process contains fail the test, as those of a daemon do (tests/lab/daemon.py)."""
    calls = sys.modules.get("kvprefetch.daemon.work.calls")
    if calls is None:
        yield
        return
    faults, failed = [], calls.EngineCalls.failed

    def noted(caller: object, error: Exception) -> None:
        faults.append(error)
        failed(caller, error)

    monkeypatch.setattr(calls.EngineCalls, "failed", noted)
    yield
    if faults and request.node.get_closest_marker("plants_fault") is None:
        raise faults[0]


def spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """Put the files with engines evenly between the others: engines want cores, and most others wait for something.

    Test processes take files in this order. The last tenth has no engines: no process is left alone with a long file.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    kinds: dict[bool, list[list[pytest.Item]]] = {True: [], False: []}
    for tests in files.values():
        kinds[any(test.get_closest_marker("e2e") for test in tests)].append(tests)
    placed = [
        (index / len(found) * (0.9 if engines else 1.0), tests)
        for engines, found in kinds.items()
        for index, tests in enumerate(found)
    ]
    return [test for _, tests in sorted(placed, key=lambda place: place[0]) for test in tests]


def pytest_collection_finish() -> None:
    """Leave the modules that all tests have imported, vLLM's among them, out of every later collection of garbage.

    There are millions of objects in them: one collection takes a second, and a suite makes many.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else nanobind takes these modules for leaks at the end of the process


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = spread(items)
    for item in items:
        item.user_properties += [("shows", astuple(each)) for each in shown.shown_by(item)]
