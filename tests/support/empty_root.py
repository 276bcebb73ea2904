"""Makes an empty root and runs scripts in it, to try an installation: Debian's, or with this machine's programs alone.

A script runs in mount and process namespaces of its own: it mounts nothing on this machine, and all its processes end
with it. apt and pip get this machine's settings (sources, keys, proxies, indexes), to reach their registries.
"""

from __future__ import annotations

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.lab import process

APT_FOLDERS = ("etc/apt/keyrings", "etc/apt/trusted.gpg.d", "etc/apt/auth.conf.d", "usr/local/share/ca-certificates")
FILES = ("etc/apt/auth.conf", "etc/resolv.conf", "etc/hosts")
# The part of apt's configuration that says how to reach a source.
APT_OPTION = re.compile(r"^Acquire::(https?::|Check-|Retries|ForceIPv).* \"[^\"]+\";$")
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
USER, HOME = "somebody", "/home/somebody"
SCRIPT = "srv/script"  # what the user runs
NO_COMPILER = "if command -v cc gcc; then exit 1; fi"
# $1: the root; $2: the script in it; then the folders to show in it, read-only.
ENTER = """
root=$1 script=$2; shift 2
mount --bind "$root" "$root" # as / of a machine it is a mount, which `ip netns` and unshare change
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 dev "$root/dev"
for device in null zero full random urandom; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
ln -s /proc/self/fd/1 "$root/dev/stdout"
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
for folder; do
    mkdir -p "$root$folder"
    mount --bind "$folder" "$root$folder"
    mount -o remount,bind,ro "$root$folder"
done
cd "$root"
exec chroot "$root" bash -e "$script"
"""


def missing() -> str:
    """Return why this machine cannot make a root; empty when it can."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [name for name in ("mmdebstrap", "apt-config", "unshare", "git") if shutil.which(name) is None]
    return f"{', '.join(absent)}: not installed" if absent else ""


def _of_release(sources: list[Path], ours: str, release: str, folder: Path) -> list[Path]:
    """Return copies for another release of those sources that have suites of ours."""
    folder.mkdir()
    copies = []
    for source in sources:
        text, count = re.subn(rf"(?<![\w-]){ours}\b", release, source.read_text())
        if count:
            copies.append(folder / source.name)
            copies[-1].write_text(text)
    return copies


def apt_options() -> list[str]:
    """Return mmdebstrap's arguments for this machine's ways to a source; mmdebstrap reads no configuration itself."""
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout
    return [f"--aptopt={line}" for line in dump.splitlines() if APT_OPTION.match(line)]


def put_checkout(checkout: Path, folder: Path) -> None:
    """Copy what a clone would have, with the changes that are not committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (checkout / name).exists():  # else it is deleted, and not committed yet
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(checkout / name, target)


def as_user(script: str, folder: str = HOME) -> str:
    """The script as an ordinary user, who gets an account and a home, and all that root put into the home."""
    return f"""
id -u {USER} >/dev/null 2>&1 || useradd --user-group --shell /bin/bash --home-dir {HOME} {USER}
mkdir -p {HOME}; chown -R {USER}: {HOME}
cat > /{SCRIPT} <<'END-OF-SCRIPT'
cd {folder}
{script}
END-OF-SCRIPT
HOME={HOME} setpriv --reuid={USER} --regid={USER} --init-groups bash -e /{SCRIPT}"""


def without_network(script: str) -> str:
    """Ports are this script's own, whatever else runs on the machine."""
    return f"exec unshare --net bash -e <<'END'\nip link set lo up\n{script}\nEND"


class Root:
    """A folder in which scripts run as in a machine's `/`, with these folders of the machine shown in it."""

    def __init__(self, path: Path, *shown: str | Path) -> None:
        self.path = path
        self._shown = [*dict.fromkeys(map(str, shown))]

    def run(self, script: str, *, timeout_s: float) -> str:
        """Run a bash script as root and return its output; raise AssertionError when it fails or takes longer."""
        (self.path / "script").write_text(script)
        log = self.path.with_suffix(".log")
        log.write_bytes(b"")
        inside = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8", "DO_NOT_TRACK": "1"}
        # `spawn` needs the environment of these sources; the script gets one of its own.
        command = ["env", "-i", *(f"{name}={value}" for name, value in inside.items())]
        command += [f"{name}={os.environ[name]}" for name in PROXIES if name in os.environ]
        command += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", ENTER, "enter"]
        child = process.spawn([*command, str(self.path), "/script", *self._shown], log=log)
        try:
            status: object = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = f"none: still running after {timeout_s} s"
        finally:
            process.reap(child)
        said = log.read_text(errors="replace")
        assert status == 0, f"exit status {status}\n" + "\n".join(said.splitlines()[-200:])
        return said

    def remove(self) -> None:
        """Remove the root; fail while anything is mounted below."""
        mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        below = [place for place in mounted if Path(place).is_relative_to(self.path)]
        assert not below, f"still mounted: {below}"
        shutil.rmtree(self.path)
        self.path.with_suffix(".log").unlink(missing_ok=True)


class ProgramsRoot(Root):
    """This machine's programs and nothing else of it, nor the network: made in a moment."""

    def __init__(self, path: Path, *shown: str | Path) -> None:
        super().__init__(path, "/usr", sys.base_prefix, *shown)
        for name in ("etc", "proc", "sys", "dev", "tmp", "run", "srv", "root", "home"):
            (path / name).mkdir(parents=True)
        (path / "tmp").chmod(0o1777)
        for name in ("bin", "sbin", "lib", "lib32", "lib64"):
            if Path("/", name).is_symlink():
                (path / name).symlink_to(Path("/", name).readlink())
        for name in ("passwd", "group", "nsswitch.conf", "ld.so.cache", "hosts"):
            shutil.copy(Path("/etc", name), path / "etc")
        shutil.copytree("/etc/alternatives", path / "etc/alternatives", symlinks=True)


class EmptyRoot(Root):
    """Debian's essential packages and apt in `path`, of this machine's release or of another one."""

    def __init__(self, path: Path, release: str = "") -> None:
        super().__init__(path)  # and the folders that pip's configuration names
        ours = platform.freedesktop_os_release()["VERSION_CODENAME"]
        sources = [
            each
            for each in (Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").iterdir()))
            if each.suffix in (".list", ".sources") and each.is_file()
        ]
        if release and release != ours:
            sources = _of_release(sources, ours, release, path.with_suffix(".sources"))
        made_by = ["nice", "mmdebstrap", "--quiet", "--mode=root", "--variant=minbase"]
        subprocess.run(
            [*made_by, *apt_options(), release or ours, path, *sources],
            check=True,
            timeout=600,
        )
        keys = {key for each in sources for key in re.findall(r"signed-by\W+(/[^\s\]]+)", each.read_text(), re.I)}
        for name in (*FILES, *(key.lstrip("/") for key in keys)):
            if Path("/", name).is_file():
                self._copy(Path("/", name))
        for name in APT_FOLDERS:
            if Path("/", name).is_dir():
                shutil.copytree(Path("/", name), path / name, dirs_exist_ok=True)
        self._configure_pip()

    def _copy(self, file: Path) -> None:
        target = self.path / file.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # it may be a link out of the root
        shutil.copy(file, target)

    def _configure_pip(self) -> None:
        said = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
        ).stdout
        settings = {}
        for line in said.splitlines():  # global.index-url='…', and :env:.… for what the environment says instead
            name, _, value = line.partition("=")
            settings[name.rpartition(".")[2]] = text = str(ast.literal_eval(value))
            for scheme, place in re.findall(r"(file://)?(/\S+)", text):
                if Path(place).is_dir():  # the pages of an index link to files beside it
                    self._shown.append(str(Path(place).parent) if scheme else place)
                elif Path(place).is_file() and not place.startswith("/etc/ssl/"):  # apt installs those
                    self._copy(Path(place))
        lines = [f"{name} = {value}" for name, value in settings.items()]
        (self.path / "etc/pip.conf").write_text("\n".join(["[global]", *lines, ""]))
