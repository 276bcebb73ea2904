"""The documents' site: every page can be found, and dead links fail the build."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages(nav: Any) -> Iterator[str]:
    """Yield the pages of a navigation, sections and all."""
    for each in nav:
        if isinstance(each, str):
            yield each
        else:
            for below in each.values():
                yield from pages(below)


def test_the_navigation_has_each_page_once() -> None:
    """All documents but the single decision records, and those outside docs/ that the site takes in."""
    found = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    found -= {name for name in found if name.startswith("adr/0")}
    outside = dict(re.findall(r'^    "(\w+\.md)": "(\w+\.md)",$', (ROOT / ".ci/site.py").read_text(), re.MULTILINE))
    assert {path.name for path in ROOT.glob("*.md")} == outside.keys()
    shown = list(pages(SITE["nav"]))
    assert set(shown) ^ {*found, *outside.values()} == set(), "mkdocs.yml, nav"
    assert len(shown) == len(set(shown))


@pytest.mark.stress
@pytest.mark.parametrize(
    ("planted", "complaint"),
    [
        ("", ""),
        ("[x](nowhere.md)", "the target is not found"),
        ("[x](TUNING.md#nowhere)", "does not contain an anchor"),
        ("[x](../daemon/nowhere.py)", "is not found among"),
    ],
)
def test_the_site_is_built_and_a_dead_link_fails(tmp_path: Path, planted: str, complaint: str) -> None:
    subprocess.run(["make", "docs"], cwd=ROOT, check=True, capture_output=True)
    for name in ("README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("daemon", "connector", "kv", "shmring", "tests", "benchmarks", "systemd", "charts", "LICENSE"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("docs", ".ci"):
        shutil.copytree(ROOT / name, tmp_path / name)
    style = tmp_path / "docs/style.md"
    style.write_text(style.read_text() + planted)
    command = [str(ROOT / ".venv-docs/bin/python"), "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == bool(planted), done.stderr
    assert complaint in done.stderr
    if not planted:
        built = list((tmp_path / "build/site").rglob("*.html"))
        assert [path.name for path in built if "```" in path.read_text()] == [], "a fence that was not understood"
        text = (tmp_path / "build/site/index.html").read_text()
        assert re.search(r'href="https://[^"]*/blob/main/shmring/wire/records.py"', text)
        assert 'href="overview.html"' in text
        assert not re.search(r'<(script|img)[^>]* src="http|<link[^>]*stylesheet[^>]* href="http', text)
