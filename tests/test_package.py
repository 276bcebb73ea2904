"""The package beside a checkout of its name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.package import ROOT, copy_package


def test_in_the_folder_above_a_checkout_the_installed_package_is_imported(tmp_path: Path) -> None:
    """`git clone URL kvprefetch` makes such a folder, and Python looks there first."""
    installed = copy_package(tmp_path / "site")
    above = tmp_path / "above"
    above.mkdir()
    (above / "kvprefetch").symlink_to(ROOT, target_is_directory=True)
    script = "import kvprefetch.shmring; from kvprefetch.connector.words import config; print(config.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", script],
        cwd=above,
        env={**os.environ, "PYTHONPATH": str(installed.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.stdout == f"{installed / 'connector/words/config.py'}\n", found.stderr
