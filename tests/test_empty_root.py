"""README, docs/tutorial.md and docs/OPERATIONS.md as a new user follows them, in an empty Debian root."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.empty_root import EmptyRoot, missing

ROOT = Path(__file__).resolve().parents[1]
CHECKOUT = "/root/kvprefetch"


def script(*documents: str) -> str:
    """The documents' blocks marked `sh root` or `sh test`: one script in the checkout, which shows itself."""
    blocks = []
    for document in documents:
        found = re.findall(r"^```sh (?:root|test)\n(.*?)^```$", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
        assert found, document
        blocks += found
    return "\n".join([f"cd {CHECKOUT}", "set -v", *blocks])


@pytest.fixture
def root() -> Iterator[EmptyRoot]:
    if why := missing():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="kvl-root-") as folder:
        Path(folder).chmod(0o755)  # apt fetches as a user of its own
        made = EmptyRoot(Path(folder) / "debian")
        try:
            made.put_checkout(ROOT, CHECKOUT)
            yield made
        finally:
            made.remove()


@pytest.mark.parametrize("document", ["README.md", "docs/tutorial.md", "docs/OPERATIONS.md"])
def test_the_commands_are_a_script(document: str) -> None:
    subprocess.run(["bash", "-n"], input=script(document), text=True, check=True)


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_what_is_broken_off_leaves_nothing(root: EmptyRoot) -> None:
    """A command that fails or takes too long is an error with its output; nothing runs on, nothing stays mounted."""
    before = Path("/proc/self/mountinfo").read_text()
    with pytest.raises(AssertionError, match=r"exit status 3(.|\n)*said before"):
        root.run("mount | grep -q ' /dev/shm '\necho said before\nexit 3", timeout_s=60)
    with pytest.raises(AssertionError, match="still running after 5 s"):
        root.run("sleep 1000 & setsid sleep 1000 & sleep 1000", timeout_s=5)
    inside = [each for each in Path("/proc").glob("[0-9]*/root") if os.path.realpath(each) == str(root.path)]
    assert inside == []
    assert Path("/proc/self/mountinfo").read_text() == before


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_readme_and_tutorial_lead_a_new_user_to_a_request_explained(root: EmptyRoot) -> None:
    """From nothing: the demo, then by hand a daemon, a real engine, two requests, and the second one explained."""
    said = root.run(script("README.md", "docs/tutorial.md"), timeout_s=3000)
    assert "All modes gave the same tokens." in said
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
def test_the_daemon_s_own_installation_is_complete(root: EmptyRoot) -> None:
    """An environment with the daemon alone: a machine examined, a configuration checked, units written."""
    said = root.run(script("docs/OPERATIONS.md"), timeout_s=1800)
    assert "round trip through a private store of its own: put, found, read, removed" in said
    assert "\nbad " not in said
    assert (root.path / "etc/systemd/system/kvprefetchd.service").exists()
