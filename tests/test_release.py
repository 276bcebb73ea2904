"""Tries what `make release` refuses and builds, and its wheels alone on an aarch64 and on Debian's newest Python."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import process

ROOT = Path(__file__).resolve().parents[1]
QEMU = "/usr/bin/qemu-aarch64-static"
SECTION = "## [9.9.9] - 2026-11-22"
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


def git(folder: Path, *command: str) -> None:
    subprocess.run(["git", "-C", folder, "-c", "user.name=x", "-c", "user.email=x@x", *command], check=True)


def make_release(folder: Path, timeout_s: float) -> tuple[int, str]:
    """Return the script's exit status and all that it said."""
    done = subprocess.run(
        ["nice", folder / ".ci/release"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
    )
    return done.returncode, done.stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_checkout_with_changes_and_a_tag_without_its_section_are_refused(tmp_path: Path) -> None:
    """Nothing is built then, and an earlier dist/ stays."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/release", tmp_path / ".ci")
    shutil.copy(ROOT / ".gitignore", tmp_path)
    (tmp_path / "dist").mkdir()
    (tmp_path / "CHANGELOG.md").write_text("## [9.9.9]\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "v9.9.9")
    status, said = make_release(tmp_path, 60)
    assert status == 1
    assert 'CHANGELOG.md has no section "## [9.9.9] - DATE" for the tag v9.9.9' in said
    (tmp_path / "CHANGELOG.md").write_text(SECTION)
    status, said = make_release(tmp_path, 60)
    assert status == 1
    assert "commit or remove these changes first:\nrelease:  M CHANGELOG.md" in said
    assert (tmp_path / "dist").is_dir()


@pytest.fixture(scope="module")
def released() -> Iterator[tuple[Path, str]]:
    """A clone of this checkout's commit with a tag, after `make release` in it; and what that said."""
    folder = process.scratch("release")
    folder.chmod(0o755)
    clone = folder / "checkout"
    try:
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        changes = (clone / "CHANGELOG.md").read_text()
        (clone / "CHANGELOG.md").write_text(re.sub(r"^## \[Unreleased\].*$", SECTION, changes, flags=re.MULTILINE))
        git(clone, "commit", "-qam", "release")
        git(clone, "tag", "v9.9.9")
        status, said = make_release(clone, 1500)
        assert status == 0, said
        yield clone, said
    finally:
        shutil.rmtree(folder)


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_a_release_is_one_wheel_per_architecture_tried_on_each_python_here(released: tuple[Path, str]) -> None:
    clone, said = released
    assert sorted(path.name for path in (clone / "dist").iterdir()) == [
        "kvprefetch-9.9.9-cp310-abi3-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
        "kvprefetch-9.9.9-cp310-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        "kvprefetch-9.9.9.tar.gz",
    ]
    head = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert len(re.findall(r"^20000 records, Python 3\.\d+\.\S+ x86_64, kvprefetch 9\.9\.9$", said, re.MULTILINE)) >= 1
    assert f"kvprefetchd 9.9.9, commit {head[:7]}" in said
    assert said.endswith("twine upload dist/*\n")
    assert "To publish v9.9.9:\n    git push origin v9.9.9" in said


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("arch", "release", "tests"),
    [("arm64", "bookworm", ["tests/shmring/test_atomics.py", "tests/shmring/test_processes.py"]), ("amd64", "sid", [])],
)
def test_a_wheel_alone_on_another_architecture_and_on_debian_s_newest_python(
    released: tuple[Path, str], arch: str, release: str, tests: list[str]
) -> None:
    """Records go through a ring to another process; under QEMU tests of shared memory pass, too."""
    clone, _ = released
    if absent := [name for name in ("mmdebstrap", QEMU, "unshare") if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(absent)}: not installed")
    root, site = clone.parent / arch, clone.parent / f"{arch}-site"
    making = ["nice", "mmdebstrap", "--quiet", "--mode=root", "--variant=extract", f"--arch={arch}"]
    making += ["--include=python3,libstdc++6,coreutils,dash", release, str(root)]
    if subprocess.run(making, timeout=900).returncode:
        pytest.skip(f"mmdebstrap found no {release} for {arch} (its words are above)")
    for name in ("mnt", "site", "checkout", "proc", "dev", "tmp"):
        (root / name).mkdir(exist_ok=True)
    [series] = [path.name.removeprefix("python") for path in (root / "usr/bin").glob("python3.*[0-9]")]
    machine = {"arm64": "aarch64", "amd64": "x86_64"}[arch]
    pip: list[str | Path] = [
        clone / "build/release/tools/bin/pip",
        "install",
        "--quiet",
        "--target",
        site,
        "--only-binary=:all:",
    ]
    for platform in ("manylinux_2_28", "manylinux2014", "manylinux_2_17", "manylinux1"):
        pip.append(f"--platform={platform}_{machine}")
    pip += [f"--python-version={series}", "--implementation=cp"]
    pip += [f"--abi={abi}" for abi in (f"cp{series.replace('.', '')}", "abi3", "none")]
    wheel = next((clone / "dist").glob(f"*{machine}.whl"))
    subprocess.run([*pip, wheel, "pytest", "pytest-timeout", "hypothesis"], check=True, timeout=600)

    def inside(*command: str) -> str:
        entered = ["nice", "unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
        entered += ["bash", "-ec", ENTER, "enter", str(root), str(site), str(clone), "/usr/bin/python3", *command]
        done = subprocess.run(entered, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1500)
        assert done.returncode == 0, done.stdout
        return done.stdout

    said = inside("/checkout/tests/support/round_trip.py")
    assert re.fullmatch(rf"20000 records, Python {series}\.\S+ {machine}, kvprefetch 9\.9\.9\n", said)
    assert "kvprefetchd 9.9.9, commit " in inside("-m", "kvprefetch.daemon", "--version")
    if tests:
        options = ["-q", "-p", "no:cacheprovider", "--rootdir=/checkout", "-c", "/checkout/pyproject.toml"]
        said = inside("-m", "pytest", *options, *(f"/checkout/{each}" for each in tests))
        assert re.search(r"^\d+ passed", said, re.MULTILINE), said
