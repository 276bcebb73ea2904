"""The rendered pod runs: its init container and daemon with their users, capabilities, mounts and read-only root, in
namespaces of their own, and an engine's side of another user that has only the socket's folder, read-only.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab.process import bound_to_parent
from tests.support.ordinary import AS_NOBODY
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
ENGINE = """
import sys
from pathlib import Path
from tests.daemon.stores import blocks
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually
engine = FakeEngine(Path(sys.argv[1]) / "kvprefetchd.sock", engine_id="beside", prefix="chart")
values = blocks("chart", 4)
engine.save(values)
eventually(lambda: engine.load(list(values)) == list(values.values()), what="a hit")
engine.close()
print("loaded")
"""


def missing() -> str:
    """Why no pod can be made here; nothing where one can."""
    if os.geteuid() != 0:
        return "only root may make namespaces"
    tried = subprocess.run(["unshare", "--mount", "--net", "ip", "link", "set", "lo", "up"], capture_output=True)
    return "" if tried.returncode == 0 else f"no namespaces here: {tried.stderr.decode().strip()}"


pytestmark = [pytest.mark.stress, pytest.mark.store, pytest.mark.skipif(bool(missing()), reason=missing())]


class Node:
    """A node's folders and one pod on it."""

    def __init__(self, folder: Path, objects: dict[str, Any]) -> None:
        self.folder = folder
        self.pod = objects["DaemonSet"]["spec"]["template"]["spec"]
        self.config = objects["ConfigMap"]["data"]

    def source(self, volume: dict[str, Any]) -> Path:
        """Make a volume, as the kubelet would, and return where it lies."""
        if "hostPath" in volume:
            made = self.folder / "node" / volume["hostPath"]["path"].lstrip("/")
        else:
            made = self.folder / volume["name"]
        made.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            for name, text in self.config.items():
                (made / name).write_text(text)
        return made

    def script(self, container: dict[str, Any], words: list[str]) -> str:
        """Return the shell commands that run these words as the container: a root of our own, read-only."""
        root = self.folder / f"root-{container['name']}"
        root.mkdir(exist_ok=True)
        lines = ["ip link set lo up", f"mount -t tmpfs -o mode=755 none {root}"]

        def bind(source: str | Path, target: str | Path, options: str = "") -> None:
            place = f"{root}{target}"
            made = f"mkdir -p {place}" if Path(source).is_dir() else f"mkdir -p $(dirname {place}); touch {place}"
            lines.append(f"{made}; mount --rbind {source} {place}")
            if options:
                lines.append(f"mount -o remount,bind,{options} {place}")

        for name in ("bin", "lib", "lib64", "sbin"):
            lines.append(f"ln -s usr/{name} {root}/{name}")
        for path in ("/usr", "/dev", "/proc", "/sys", "/etc/passwd", "/etc/group", "/etc/ld.so.cache"):
            bind(path, path)
        # Python, its packages and the checkout, where they lie
        ours = {ROOT, Path(sys.prefix), Path(sys.base_prefix), *map(Path, sys.path)}
        for folder in sorted(path for path in ours if path.is_dir() and not path.is_relative_to("/usr")):
            if not any(other != folder and folder.is_relative_to(other) for other in ours):
                bind(folder, folder)
        volumes = {volume["name"]: volume for volume in self.pod["volumes"]}
        for mount in container["volumeMounts"]:
            source = self.source(volumes[mount["name"]])
            bind(source, mount["mountPath"], "ro" if mount.get("readOnly") else "")
        rights = {**self.pod["securityContext"], **container["securityContext"]}
        assert rights["readOnlyRootFilesystem"]
        lines.append(f"mount -o remount,ro {root}")
        kept = "".join(f",+{name.lower()}" for name in rights["capabilities"].get("add", ()))
        user = f"--reuid={rights['runAsUser']} --regid={rights['runAsGroup']} --clear-groups --no-new-privs"
        lines.append(
            f"exec chroot {root} setpriv {user} --inh-caps=-all --bounding-set=-all{kept} env -i "
            f"PATH=/usr/bin:/bin {shlex.join(words)}"
        )
        return "\n".join(lines)

    def start(self, container: dict[str, Any], words: list[str]) -> subprocess.Popen[bytes]:
        command = ["unshare", "--mount", "--net", "--propagation=private", "sh", "-ec", self.script(container, words)]
        return subprocess.Popen(bound_to_parent(command), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def engine(self, groups: str) -> subprocess.CompletedProcess[str]:
        """Run an engine's side as an ordinary user with these groups; it has the folder read-only."""
        there = self.folder / "node/run/kvprefetch"
        user = [word.replace("--clear-groups", groups) for word in AS_NOBODY]
        engine = shlex.join([*user, sys.executable, "-c", ENGINE, str(there)])
        script = f"mount --bind {there} {there}; mount -o remount,bind,ro {there}; ! touch {there}/x; exec {engine}"
        command = ["unshare", "--mount", "--propagation=private", "sh", "-ec", script]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    objects = yaml.safe_load_all((ROOT / "tests/chart/all.rendered.yaml").read_text())
    return Node(tmp_path, {each["kind"]: each for each in objects})


def test_the_rendered_pod_serves_an_engine_of_another_user(node: Node) -> None:
    """Init container, daemon, probes, engine, and the end: exit status 0, socket gone, the disk's folder closed."""
    (folders,), (container,) = node.pod["initContainers"], node.pod["containers"]
    for _ in range(2):  # again after a restart of the pod
        init = node.start(folders, folders["command"])
        assert init.communicate(timeout=60)[0] == b""
        assert init.returncode == 0
    user = node.pod["securityContext"]["runAsUser"]
    run, disk = node.folder / "node/run/kvprefetch", node.folder / "node/mnt/nvme/disk"
    assert [path.stat().st_uid for path in (run, disk)] == [user, user]
    assert disk.stat().st_mode & 0o777 == 0o700
    daemon = node.start(container, [sys.executable, "-m", "kvprefetch.daemon", *container["args"]])
    try:

        def probed(kind: str) -> bool:
            """Run the probe's command as the container's user, in its mounts and network."""
            program, *words = container[kind]["exec"]["command"]
            assert program == "kvprefetchd"
            enter = ["nsenter", "--net", "--mount", f"--target={daemon.pid}", f"--root=/proc/{daemon.pid}/root"]
            enter += [f"--wd={ROOT}", "setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "env", "-i"]
            ask = [*enter, "PATH=/usr/bin:/bin", sys.executable, "-m", "kvprefetch.daemon", *words]
            return subprocess.run(ask, capture_output=True, timeout=30, check=False).returncode == 0

        eventually(lambda: daemon.poll() is not None or probed("readinessProbe"), 60, "readiness")
        assert daemon.poll() is None, daemon.communicate()[0].decode()
        assert probed("livenessProbe")
        served = node.engine(f"--groups={user}")
        assert (served.returncode, served.stdout) == (0, "loaded\n"), served.stderr
        refused = node.engine("--clear-groups")
        assert refused.returncode != 0
        assert "PermissionError" in refused.stderr
    finally:
        daemon.terminate()
        said = daemon.communicate(timeout=120)[0].decode()
    assert daemon.returncode == 0, said
    assert list(run.iterdir()) == []
