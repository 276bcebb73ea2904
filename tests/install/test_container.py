"""Follows docs/install/container.md: from nothing to a daemon that serves an engine in another container, and back.

podman without a daemon stands in for Docker, and a Debian of mmdebstrap for the base image: no registry is needed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.empty_root import EmptyRoot, missing

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/install/container.md").read_text()
BASE = "localhost/debian:12-slim"
LARGEST_BYTES = 400_000_000
# Limits below this machine's, which a container may not raise; the network is the machine's.
CONFIGURATION = """
[containers]
netns = "host"
default_ulimits = ["nofile=16384:16384", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
runtime = "runc"
"""
# What this machine needs beyond the page's commands. Without systemd nobody calls the health check: the test does.
DOCKER = """#!/bin/sh
command=$1; shift
case $command in
build) set -- --isolation chroot --network host --format docker --build-arg BASE={base} {volumes} "$@" ;;
run) set -- --health-interval disable "$@" ;;
esac
exec podman --root {store}/root --runroot {store}/run --storage-driver overlay --log-level fatal "$command" "$@"
"""
# Another user with the group, and the folder read-only.
ENGINE = r"""
docker run --detach --name engine --user 1000:1000 --group-add 970 --volume /run/kvprefetch:/run/kvprefetch:ro \
    --volume $PWD:/checkout:ro --env PYTHONPATH=/checkout:/checkout/build/pytest \
    --entrypoint /opt/kvprefetch/bin/python kvprefetchd -m tests.install.container_engine
"""


def commands() -> list[str]:
    """Return the page's blocks, with small sizes and without a port that another daemon may have."""
    blocks = re.findall(r"^```sh container\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    small = [each.replace("--staging 8GiB --memory 16GiB", "--staging 32MiB --memory 64MiB") for each in blocks]
    return [each.replace("kvprefetchd serve ", "kvprefetchd serve --metrics-port 0 ") for each in small]


def indexes(root: Path) -> set[Path]:
    """Return the folders of this machine that pip's configuration in the root names."""
    found = re.findall(r"(file://)?(/[^\s']+)", (root / "etc/pip.conf").read_text())
    folders = {Path(place).parent if scheme else Path(place) for scheme, place in found}
    return {each for each in folders if each.is_dir() and not each.is_relative_to("/etc")}


class Machine:
    """A folder with a store of images, a `docker`, the checkout, and what the page calls /run/kvprefetch."""

    def __init__(self, folder: Path, volumes: list[str]) -> None:
        self.folder, self.socket_folder = folder, folder / "run-kvprefetch"
        (folder / "containers.conf").write_text(CONFIGURATION)
        docker = folder / "bin/docker"
        docker.parent.mkdir()
        docker.write_text(DOCKER.format(base=BASE, volumes=" ".join(volumes), store=folder / "store"))
        docker.chmod(0o755)
        self.environ = {**os.environ, "PATH": f"{docker.parent}:{os.environ['PATH']}"}
        self.environ["CONTAINERS_CONF"] = str(folder / "containers.conf")

    def run(self, script: str, timeout_s: float = 300) -> str:
        """Run it in the checkout and return its output, errors too; raise AssertionError when it fails."""
        script = re.sub(r"(?<=[ \n])/run/kvprefetch(?=[:\n])", str(self.socket_folder), script)
        done = subprocess.run(
            ["nice", "bash", "-ec", script],
            cwd=self.folder / "checkout",
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}"
        return done.stdout

    def wait_said(self, text: str) -> None:
        """Wait until the engine's container has said it."""
        self.run(f"timeout 90 sh -c 'until docker logs engine 2>&1 | grep \"{text}\"; do sleep 0.5; done'")


def control_groups() -> set[Path]:
    return set(Path("/sys/fs/cgroup").glob("**/libpod_parent"))


@pytest.fixture
def machine() -> Iterator[Machine]:
    absent = [name for name in ("podman", "runc") if shutil.which(name) is None]
    if why := missing() or (f"{', '.join(absent)}: not installed" if absent else ""):
        pytest.skip(why)
    folder, before = Path(tempfile.mkdtemp(prefix="kvl-")), control_groups()  # podman refuses long paths
    folder.chmod(0o755)
    base = EmptyRoot(folder / "debian")
    made = Machine(folder, [f"--volume {each}:{each}:ro" for each in indexes(base.path)])
    try:
        subprocess.run(["git", "clone", "-q", ROOT, folder / "checkout"], check=True)
        unwanted = " ".join(f"--exclude=./usr/share/{each}/*" for each in ("doc", "man", "locale"))  # as debian:12-slim
        made.run(f"tar -C {base.path} -c {unwanted} . | docker import - {BASE}")
        yield made
    finally:
        made.run("docker rm --force --all; docker rmi --force --all || true")
        subprocess.run(["umount", folder / "store/root/overlay"], check=False)
        for group in control_groups() - before:
            for below in sorted(group.glob("**/"), reverse=True):
                below.rmdir()
        base.remove()
        shutil.rmtree(folder)


@pytest.mark.stress
@pytest.mark.timeout(2400)
def test_an_engine_in_another_container_is_served_across_a_restart_and_nothing_is_left(machine: Machine) -> None:
    build, serve, restart, remove = commands()
    machine.run(build, 1500)
    [image] = json.loads(machine.run("docker image inspect kvprefetchd"))
    assert image["Size"] <= LARGEST_BYTES
    assert image["User"] == "970:970"
    assert {"title", "description", "licenses", "source"} <= {name.rpartition(".")[2] for name in image["Labels"]}
    said = machine.run(serve)
    assert re.search(r"^ready: pid 1, mode on, engines 0$", said, re.MULTILINE), said
    machine.run("docker healthcheck run kvprefetchd")
    assert machine.run("docker exec kvprefetchd id -u") == "970\n"
    assert re.search(r", commit [0-9a-f]{7,}", machine.run("docker exec kvprefetchd kvprefetchd --version"))
    for file in ("/x", "/opt/kvprefetch/x", "/etc/x"):
        machine.run(f"! docker exec kvprefetchd touch {file}")
    large = "import json; print(json.dumps(['ab' * 32] * 10_000))"  # beyond 512 KiB the door keeps it in a file
    prefetch = f'/opt/kvprefetch/bin/python -c \\"{large}\\" | kvprefetchd prefetch - 2>&1; true'
    assert "not one engine but 0" in machine.run(f'docker exec kvprefetchd sh -c "{prefetch}"')
    unwanted = "command -v gcc pip git; ls -d /opt/kvprefetch/lib/*/site-packages/torch; true"
    assert "\n/" not in "\n" + machine.run(f"docker exec kvprefetchd sh -c '{unwanted}' 2>/dev/null")
    # The double of an engine imports pytest.
    machine.run(f"{sys.executable} -m pip install --quiet --target build/pytest pytest")
    machine.run(ENGINE)
    machine.wait_said("first daemon: 8 blocks saved and loaded")
    machine.run(restart)
    assert machine.run("docker logs kvprefetchd").count('"daemon.ready"') == 2
    machine.wait_said("second daemon: 8 blocks saved and loaded")
    assert machine.run("docker wait engine").splitlines() == ["0"]
    machine.run(f"docker rm engine\n{remove}")
    assert machine.run("docker ps --all --quiet") == ""
    assert machine.run("docker images --all --format '{{.Repository}}:{{.Tag}}'") == f"{BASE}\n"
    assert not machine.socket_folder.exists()
