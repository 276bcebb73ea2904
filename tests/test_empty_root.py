"""Three strangers, a newcomer, an operator and a contributor, follow the documents in an empty Debian root."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.empty_root import EmptyRoot, missing, put_checkout

ROOT = Path(__file__).resolve().parents[1]
CHECKOUT = "/root/kvprefetch"


# Before each command, the seconds since the start, and the command.
CLOCK = r"""
trap 'printf "\n== %s s: %s\n" "$SECONDS" "${BASH_COMMAND%%[[:cntrl:]]*}"' DEBUG
""".strip()


def script(*documents: str, marks: str = "root|test") -> str:
    """The documents' blocks with these marks: one script in the checkout, which shows its commands and their time."""
    blocks = []
    for document in documents:
        text = (ROOT / document).read_text()
        found = re.findall(rf"^```sh (?:{marks})\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        assert found, document
        for block in found:
            heading = re.findall(r"^#+ (.*)$", text.split(block)[0], re.MULTILINE)[-1]
            blocks += [f": {document}, {heading}", block]
    return "\n".join([f"cd {CHECKOUT}", CLOCK, *blocks, ": the end"])


def steps(said: str) -> list[str]:
    """The time of each step, and of its commands that took a second or more."""
    marks = [(int(second), what) for second, what in re.findall(r"^== (\d+) s: (.*)$", said, re.MULTILINE)]
    begins = [(at, what) for at, what in marks if what.startswith(": ")]
    lines = []
    for (at, what), (end, _) in itertools.pairwise(begins):
        lines.append(f"{end - at:5} s  {what[2:]}")
        took: Counter[str] = Counter()
        for (since, command), (until, _) in itertools.pairwise(marks):
            if at <= since < end:
                took[command] += until - since
        lines += [f"{seconds:9} s  {command[:90]}" for command, seconds in took.items() if seconds and command != what]
    return lines


def journey(root: EmptyRoot, script: str, timeout_s: float, capsys: pytest.CaptureFixture[str]) -> str:
    """Run it, print the time of each step, and return its output."""
    said = root.run(script, timeout_s=timeout_s)
    with capsys.disabled():
        print("", *steps(said), sep="\n")
    return said


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


def test_the_time_of_each_step_is_found() -> None:
    """Steps and commands get their seconds; a loop's commands are added up."""
    text = f"{CLOCK}\n: a.md, First\nsleep 1.2\n: b.md, Second\nfor i in 1 2; do sleep 1.1; done\n: the end"
    said = subprocess.run(["bash", "-e"], input=text, capture_output=True, text=True, check=True).stdout
    found = [re.sub(r"\d+ s", "N s", line) for line in steps(said)]
    assert [" ".join(line.split()) for line in found] == [
        "N s a.md, First", "N s sleep 1.2", "N s b.md, Second", "N s sleep 1.1",
    ]  # fmt: skip


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_what_is_broken_off_leaves_nothing(root: EmptyRoot) -> None:
    """A command that fails or takes too long is an error with its output; nothing runs on, nothing stays mounted."""
    with pytest.raises(AssertionError, match=r"exit status 3(.|\n)*said before"):
        root.run("mount | grep -q ' /dev/shm '\necho said before\nexit 3", timeout_s=60)
    with pytest.raises(AssertionError, match="still running after 5 s"):
        root.run("sleep 1000 & setsid sleep 1000 & sleep 1000", timeout_s=5)
    inside = [each for each in Path("/proc").glob("[0-9]*/root") if os.path.realpath(each) == str(root.path)]
    assert inside == []
    assert str(root.path) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.stress
@pytest.mark.timeout(5400)
def test_a_newcomer_comes_to_a_request_explained(root: EmptyRoot, capsys: pytest.CaptureFixture[str]) -> None:
    """From nothing: the demo, then by hand a daemon, a real engine, two requests, and the second one explained."""
    said = journey(root, script("README.md", "docs/tutorial.md"), 5000, capsys)
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
def test_an_operator_comes_to_a_daemon_that_is_ready(root: EmptyRoot, capsys: pytest.CaptureFixture[str]) -> None:
    """The daemon's own environment: a machine examined, a configuration checked, units written, a daemon looked at."""
    said = journey(root, script("docs/OPERATIONS.md", marks="root|test|test serving"), 1800, capsys)
    assert re.search(r"^ready: pid \d+, mode on", said, re.MULTILINE)
    assert "mode: on (was shadow)" in said
    assert "round trip through a private store of its own: put, found, read, removed" in said
    assert "\nbad " not in said
    assert (root.path / "etc/systemd/system/kvprefetchd.service").exists()


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_a_contributor_comes_to_checks_that_pass(root: EmptyRoot, capsys: pytest.CaptureFixture[str]) -> None:
    """From nothing: `make check`, and one file of tests."""
    said = journey(root, script("CONTRIBUTING.md"), 3000, capsys)
    assert len(re.findall(r"^=* ?\d+ passed", said, re.MULTILINE)) >= 2, said[-2000:]
