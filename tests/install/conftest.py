"""A release of this checkout, made once for all tests that install from its wheels."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab import process
from tests.support.empty_root import put_checkout
from tests.support.pages import ROOT

VERSION = "9.9.9"
SECTION = f"## [{VERSION}] - 2026-11-22"


@dataclass(frozen=True)
class Checkout:
    """A repository of its own, in which nothing of this one can be changed."""

    folder: Path

    def git(self, *command: str) -> str:
        asked = ["git", "-C", str(self.folder), "-c", "user.name=x", "-c", "user.email=x@x", *command]
        return subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout

    def release(self, timeout_s: float) -> tuple[int, str]:
        """Run what `make release` runs; return its exit status and all that it said."""
        command = ["nice", str(self.folder / ".ci/release")]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False
        )
        return done.returncode, done.stdout

    def put_dist(self, folder: Path) -> None:
        """Copy what was released, as to another machine."""
        shutil.copytree(self.folder / "dist", folder / "dist")


@pytest.fixture(scope="session")
def released() -> Iterator[tuple[Checkout, str]]:
    """A clone with this checkout's changes and a tag, after `make release` in it; and what that said."""
    scratch = process.scratch("release")
    scratch.chmod(0o755)
    clone = Checkout(scratch / "checkout")
    try:
        subprocess.run(["git", "clone", "-q", ROOT, clone.folder], check=True)
        put_checkout(ROOT, clone.folder)
        changes = clone.folder / "CHANGELOG.md"
        changes.write_text(re.sub(r"^## \[Unreleased\].*$", SECTION, changes.read_text(), flags=re.MULTILINE))
        clone.git("add", "--all")
        clone.git("commit", "-qm", "release")
        clone.git("tag", f"v{VERSION}")
        status, said = clone.release(1500)
        assert status == 0, said
        yield clone, said
    finally:
        shutil.rmtree(scratch)
