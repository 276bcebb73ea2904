"""Takes the commands out of a page of the documents, and finds what an installation leaves in a root."""

from __future__ import annotations

import re
import stat
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Written by what runs on any machine: logs, the state of systemd and apt, backups of /etc/passwd, compiled Python.
OF_ITS_OWN = re.compile(
    r"(proc|sys|dev|run|tmp|script|var/(log|cache|tmp|lib/(systemd|private))|etc/((passwd|group|g?shadow|sub[ug]id)-|machine-id|"
    r"\.pwd\.lock|\.updated)|var/\.updated)(/|$)|.*/__pycache__(/|$)"
)


def blocks(page: str, *marks: str) -> list[str]:
    """Return the page's fenced blocks that open with ```sh and one of these marks, in their order."""
    text = (ROOT / page).read_text()
    found = re.findall(rf"^```sh (?:{'|'.join(marks)})\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found, (page, marks)
    return found


def files(root: Path, *without: str) -> dict[str, str]:
    """Return what lies below `root`, without these folders: of each path its mode, owner, and size or target."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if OF_ITS_OWN.match(name) or any(f"{name}/".startswith(f"{each}/") for each in without):
            continue
        entry = path.lstat()
        kind = str(path.readlink()) if path.is_symlink() else "" if stat.S_ISDIR(entry.st_mode) else entry.st_size
        found[name] = f"{stat.filemode(entry.st_mode)} {entry.st_uid}:{entry.st_gid} {kind}"
    return found


def traces(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the paths that differ, each with what it was and is."""
    names = sorted({*before.items()} ^ {*after.items()})
    return [f"{name}: {before.get(name)} -> {after.get(name)}" for name in sorted({name for name, _ in names})]
