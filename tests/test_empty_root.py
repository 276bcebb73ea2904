"""Three strangers, a newcomer, an operator and a contributor, follow the documents in an empty Debian root."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.empty_root import EmptyRoot, missing, put_checkout
from tests.support.pages import ROOT, blocks

CHECKOUT = "/root/kvprefetch"


def script(*documents: str, marks: tuple[str, ...] = ("root", "test")) -> str:
    """The documents' blocks with these marks: one script in the checkout, which shows its commands."""
    found = [block for document in documents for block in blocks(document, *marks)]
    return "\n".join([f"cd {CHECKOUT}", "set -x", *found])


@pytest.fixture
def root() -> Iterator[EmptyRoot]:
    if why := missing():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="kvl-root-") as folder:
        Path(folder).chmod(0o755)  # apt fetches as a user of its own
        made = EmptyRoot(Path(folder) / "debian")
        try:
            put_checkout(ROOT, made.path / CHECKOUT.lstrip("/"))
            yield made
        finally:
            made.remove()


@pytest.mark.parametrize("document", ["README.md", "docs/tutorial.md", "docs/OPERATIONS.md", "CONTRIBUTING.md"])
def test_the_commands_are_a_script(document: str) -> None:
    subprocess.run(["bash", "-n"], input=script(document), text=True, check=True)


@pytest.mark.stress
@pytest.mark.timeout(5400)
def test_a_newcomer_comes_to_a_request_explained(root: EmptyRoot) -> None:
    """From nothing: the demo, then by hand a daemon, a real engine, two requests, and the second one explained."""
    said = root.run(script("README.md", "docs/tutorial.md"), timeout_s=5000)
    assert "All ways gave the same tokens." in said
    texts = re.findall(r'^{"id":"cmpl-\w+".*"text":("[^"]*")', said, re.MULTILINE)
    assert len(texts) == 2
    assert texts[0] == texts[1]
    explained = said.split("kvprefetchd explain")[-1]
    assert re.search(r"^request \S*second\S* of engine \S+: loaded$", explained, re.MULTILINE), explained
    assert re.search(r"^\d+ blocks \(\d+ tokens\): 0 local, [1-9]\d* more in the store", explained, re.MULTILINE)


@pytest.mark.stress
@pytest.mark.timeout(5400)
def test_make_test_passes_on_a_machine_that_never_saw_the_project(root: EmptyRoot) -> None:
    """README's first line, then `make test` to its end. Tests are skipped only for hardware that this machine lacks."""
    install = re.search(r"^apt-get update && apt-get install .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert install is not None
    said = root.run(f"cd {CHECKOUT}\n{install[0]}\nmake test", timeout_s=5000)
    assert re.fullmatch(r"=+ \d+ passed, \d+ skipped in .* =+", said.splitlines()[-1]), said[-2000:]
    assert "are skipped or fail" not in said, "a package is installed that the tests cannot use"
    absent = [line for line in said.splitlines() if line.startswith("SKIPPED") and "is not installed" in line]
    assert absent == []


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_an_operator_comes_to_a_daemon_that_is_ready(root: EmptyRoot) -> None:
    """The daemon's own environment: a machine examined, a configuration checked, units written, a daemon looked at."""
    said = root.run(script("docs/OPERATIONS.md", marks=("root", "test", "test serving")), timeout_s=1800)
    assert re.search(r"^ready: pid \d+, mode on", said, re.MULTILINE)
    assert "mode: on (was shadow)" in said
    assert "round trip through a private store of its own: put, found, read, removed" in said
    assert "\nbad " not in said
    assert (root.path / "etc/systemd/system/kvprefetchd.service").exists()


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_a_contributor_comes_to_checks_that_pass(root: EmptyRoot) -> None:
    """From nothing: `make check`, and one file of tests."""
    said = root.run(script("CONTRIBUTING.md"), timeout_s=3000)
    assert len(re.findall(r"^=* ?\d+ passed", said, re.MULTILINE)) >= 2, said[-2000:]
