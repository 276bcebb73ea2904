"""Tries what `make release` refuses and builds, and its wheels alone on an aarch64 and on Debian's newest Python."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.install.conftest import SECTION, VERSION, Checkout
from tests.support.empty_root import apt_options
from tests.support.pages import ROOT

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
QEMU = "/usr/bin/qemu-aarch64-static"
# The beginning of an ELF file for aarch64, and the bits of it that count.
ELF = "7f454c4602010100" + 8 * "00" + "0200b700"
MASK = "ffffffffffffff00" + 8 * "ff" + "feffffff"
MAGIC = ":".join("".join(rf"\x{each}" for each in re.findall("..", text)) for text in (ELF, MASK))
# $1: the root; $2: the packages of Python; $3: the checkout; then a command in the root. In a user namespace of its own
# the machine knows nothing of the other architecture's interpreter, and all mounts go with the command.
ENTER = rf"""
root=$1 site=$2 checkout=$3; shift 3
mount -t binfmt_misc binfmt_misc "$root/mnt"
if [ -e "$root/usr/lib/aarch64-linux-gnu" ]; then
    printf '%s' ':aarch64:M::{MAGIC}:{QEMU}:F' >"$root/mnt/register"
fi
mount --bind "$site" "$root/site"
mount --bind "$checkout" "$root/checkout"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/tmp"
environment="PATH=/usr/bin:/bin HOME=/tmp PYTHONPATH=/site:/checkout PYTHONDONTWRITEBYTECODE=1"
exec env -i $environment /usr/sbin/chroot "$root" "$@"
"""


@pytest.fixture
def small(tmp_path: Path) -> Checkout:
    """A repository with a tag, and with no more than decides whether and as what it is released."""
    made = Checkout(tmp_path / "small")
    (made.folder / ".ci").mkdir(parents=True)
    for name in (".ci/describe", ".ci/release", ".gitignore", "pyproject.toml"):
        shutil.copy(ROOT / name, made.folder / name)
    (made.folder / "CHANGELOG.md").write_text(f"{SECTION}\n")
    made.git("init", "-q")
    made.git("add", ".")
    made.git("commit", "-qm", "first")
    made.git("tag", f"v{VERSION}")
    return made


@needs_git
def test_a_checkout_with_changes_and_a_tag_without_its_section_are_refused(small: Checkout) -> None:
    """Nothing is built then, and an earlier dist/ stays."""
    (small.folder / "dist").mkdir()
    (small.folder / "CHANGELOG.md").write_text("## [9.9.9]\n")
    status, said = small.release(60)
    assert status == 1
    assert "commit or remove these changes first:\nrelease:  M CHANGELOG.md" in said
    small.git("commit", "-qam", "a section without its date")
    small.git("tag", "--force", "v9.9.9")
    status, said = small.release(60)
    assert status == 1
    assert 'CHANGELOG.md has no section "## [9.9.9] - DATE" for the tag v9.9.9' in said
    assert (small.folder / "dist").is_dir()


@needs_git
def test_what_has_not_the_repository_s_tags_is_refused_with_the_cure(small: Checkout, tmp_path: Path) -> None:
    """A copy without git, one inside another repository, and a clone without its history."""
    small.git("commit", "-qm", "second", "--allow-empty")
    shallow = Checkout(tmp_path / "shallow")
    small.git("clone", "-q", "--depth=1", f"file://{small.folder}", str(shallow.folder))
    status, said = shallow.release(60)
    assert (status, said) == (1, "release: this clone has no old tags: git fetch --unshallow --tags\n")
    shallow.git("fetch", "-q", "--unshallow", "--tags")
    for history in (tmp_path / ".git", None):
        git = shallow.folder / ".git"
        git.rename(history) if history is not None else shutil.rmtree(tmp_path / ".git")
        status, said = shallow.release(60)
        assert (status, said.count("git clone the repository, and run this there")) == (1, 1), said


@needs_git
def test_the_version_is_the_tag_s_and_later_builds_are_of_the_next_one(small: Checkout) -> None:
    """Without the tag, as in a clone without tags, the changelog's last release stands in for it."""
    pytest.importorskip("setuptools_scm")
    asked = [sys.executable, "-m", "setuptools_scm"]

    def version() -> str:
        return subprocess.run(asked, cwd=small.folder, stdout=subprocess.PIPE, text=True, check=True).stdout

    assert version() == "9.9.9\n"
    small.git("commit", "-qm", "second", "--allow-empty")
    assert version() == "9.10.0.dev1\n"
    small.git("tag", "--delete", f"v{VERSION}")
    assert version() == "9.10.0.dev2\n"
    with (small.folder / "CHANGELOG.md").open("a") as changes:
        changes.write("\n## [9.0.0] - 2026-11-21\n")
    assert version() == "9.10.0.dev2\n"
    shutil.rmtree(small.folder / ".git")
    assert version() == "0.0.0+unknown\n"


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_a_release_is_one_wheel_per_architecture_tried_on_each_python_here(released: tuple[Checkout, str]) -> None:
    clone, said = released
    assert sorted(path.name for path in (clone.folder / "dist").iterdir()) == [
        "kvprefetch-9.9.9-cp310-abi3-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
        "kvprefetch-9.9.9-cp310-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        "kvprefetch-9.9.9.tar.gz",
    ]
    commit = clone.git("rev-parse", "HEAD")[:7]
    assert len(re.findall(r"^20000 records, Python 3\.\d+\.\S+ x86_64, kvprefetch 9\.9\.9$", said, re.MULTILINE)) >= 1
    assert f"kvprefetchd 9.9.9, commit {commit}" in said
    assert said.endswith("twine upload dist/*\n")
    assert "To publish v9.9.9:\n    git push origin v9.9.9" in said


class Alone:
    """A Debian root with Python, of any architecture, and beside it the wheel with what it depends on."""

    def __init__(self, clone: Checkout, arch: str, release: str) -> None:
        if absent := [name for name in ("mmdebstrap", QEMU, "unshare") if shutil.which(name) is None]:
            pytest.skip(f"{', '.join(absent)}: not installed")
        self._clone = clone.folder
        self._root, self._site = clone.folder.parent / arch, clone.folder.parent / f"{arch}-site"
        making = ["nice", "mmdebstrap", "--quiet", "--mode=root", "--variant=extract", f"--arch={arch}", *apt_options()]
        making += ["--include=base-files,python3,libstdc++6,coreutils,dash", release, str(self._root)]
        subprocess.run(making, check=True, timeout=900)
        for name in ("mnt", "site", "checkout", "proc", "dev", "tmp"):
            (self._root / name).mkdir(exist_ok=True)
        [self.series] = [path.name.removeprefix("python") for path in (self._root / "usr/bin").glob("python3.*[0-9]")]
        self.machine = {"arm64": "aarch64", "amd64": "x86_64"}[arch]
        pip: list[str | Path] = [self._clone / "build/release/tools/bin/pip", "install", "--quiet"]
        for platform in ("manylinux_2_28", "manylinux2014", "manylinux_2_17", "manylinux1"):
            pip.append(f"--platform={platform}_{self.machine}")
        pip += ["--target", self._site, "--only-binary=:all:", f"--python-version={self.series}", "--implementation=cp"]
        pip += [f"--abi={abi}" for abi in (f"cp{self.series.replace('.', '')}", "abi3", "none")]
        wheel = next((self._clone / "dist").glob(f"*{self.machine}.whl"))
        subprocess.run([*pip, wheel, "pytest", "pytest-timeout", "hypothesis"], check=True, timeout=600)

    def run(self, *command: str, timeout_s: float = 600) -> str:
        """Run the root's Python and return its output; raise AssertionError when it fails."""
        entered = ["nice", "unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
        entered += ["bash", "-ec", ENTER, "enter", str(self._root), str(self._site), str(self._clone)]
        python = [*entered, "/usr/bin/python3", *command]
        done = subprocess.run(python, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def assert_a_round_trip(self) -> None:
        """Records go through a ring to another process."""
        said = self.run("/checkout/tests/support/round_trip.py")
        expected = rf"20000 records, Python {self.series}\.\S+ {self.machine}, kvprefetch 9\.9\.9\n"
        assert re.fullmatch(expected, said), said
        assert "kvprefetchd 9.9.9, commit " in self.run("-m", "kvprefetch.daemon", "--version")


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_the_wheel_alone_on_debian_s_newest_python(released: tuple[Checkout, str]) -> None:
    newest = Alone(released[0], "amd64", "sid")
    assert tuple(map(int, newest.series.split("."))) >= (3, 14)
    newest.assert_a_round_trip()


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_the_wheel_for_aarch64_passes_all_tests_of_shared_memory(released: tuple[Checkout, str]) -> None:
    """Under QEMU, where hypothesis takes minutes for what takes it seconds here."""
    other = Alone(released[0], "arm64", "bookworm")
    other.assert_a_round_trip()
    options = ["-q", "-p", "no:cacheprovider", "--rootdir=/checkout", "-c", "/checkout/pyproject.toml", "--timeout=900"]
    said = other.run("-m", "pytest", *options, "/checkout/tests/shmring", timeout_s=3000)
    assert re.search(r"^\d+ passed", said, re.MULTILINE), said
