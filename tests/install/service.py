"""Installs the service in a Debian root as docs/install/systemd.md says, and steers it on the booted machine."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.install.conftest import Checkout
from tests.lab import process
from tests.support import empty_root, machine
from tests.support.empty_root import NO_COMPILER, EmptyRoot, put_checkout
from tests.support.machine import Machine
from tests.support.pages import ROOT, blocks, files

PAGE = "docs/install/systemd.md"
# The tests, a folder with `dist` in it, and the environment of an engine.
CHECKOUT, RELEASE, ENGINE = "/srv/kvprefetch", "/srv/release", "/srv/engine"
DROP_INS = Path("/run/systemd/system/kvprefetchd.service.d")
CONFIG = "/etc/kvprefetch/kvprefetchd.toml"
QUICK = 'staging = "64MiB"\nmemory = "64MiB"\n'
PROBE = f"{CHECKOUT}/tests/install/probe.py"
# The machine and another one, behind a link.
OURS, OTHER = "10.97.0.1", "10.97.0.2"
LINK = f"""
ip netns add far && ip link add near type veth peer name far0 && ip link set far0 netns far
ip addr add {OURS}/24 dev near && ip link set near up
ip -n far addr add {OTHER}/24 dev far0 && ip -n far link set far0 up
"""


@contextlib.contextmanager
def installed(released: Checkout, release: str = "") -> Iterator[tuple[EmptyRoot, dict[str, str]]]:
    """A root with what a machine has: systemd, a user with an engine's environment, and then the page's installation
    from the wheel. Beside it, the files that it had before the installation."""
    if why := empty_root.missing() or machine.missing():
        pytest.skip(why)
    folder = process.scratch("root")
    folder.chmod(0o755)
    root = EmptyRoot(folder / "debian", release)
    try:
        put_checkout(ROOT, root.path / CHECKOUT.lstrip("/"))
        released.put_dist(root.path / RELEASE.lstrip("/"))
        packages, install = blocks(PAGE, "root")
        system = "systemd-sysv dbus libpam-systemd iproute2 logrotate"
        root.run(f"{packages}\napt-get install -y --no-install-recommends {system}", timeout_s=900)
        root.run(
            f"useradd --create-home engine\nuseradd stranger\npython3 -m venv {ENGINE}\n"
            f"{ENGINE}/bin/pip install --no-cache-dir {RELEASE}/dist/*_$(uname -m).whl pytest\n{NO_COMPILER}",
            timeout_s=600,
        )
        with Machine(root):
            pass  # the first boot leaves files of its own
        before = files(root.path, CHECKOUT.lstrip("/"))
        root.run(f"cd {RELEASE}\n{install}", timeout_s=600)
        yield root, before
    finally:
        root.remove()
        shutil.rmtree(folder)


def drop_in(vm: Machine, *lines: str, name: str = "test") -> None:
    """Change the service until the end of the test."""
    text = "\n".join(["[Service]", *lines])
    vm.run(f"mkdir -p {DROP_INS}\ncat > {DROP_INS}/{name}.conf <<'END'\n{text}\nEND\nsystemctl daemon-reload")


def configure(vm: Machine, *lines: str) -> None:
    text = QUICK + "\n".join(lines)
    vm.run(f"cat > {CONFIG} <<'END'\n{text}\nEND")


def shown(vm: Machine, *names: str) -> list[str]:
    """Properties of the service, as systemctl shows them."""
    said = vm.run("".join(f"systemctl show --value -p {name} kvprefetchd\n" for name in names))
    return said.splitlines()


def engine(what: str, name: str) -> str:
    return f"cd {CHECKOUT} && {ENGINE}/bin/python -m tests.install.engine {what} {name}"


def ready(vm: Machine) -> None:
    vm.run("kvprefetchd health --wait 60")


def running(vm: Machine) -> list[str]:
    """Names of the processes of ours and of the store."""
    return re.findall(r"^kvprefetch.*|^mooncake.*", vm.run("cat /proc/[0-9]*/comm"), re.MULTILINE)


def pid(vm: Machine) -> int:
    return int(shown(vm, "MainPID")[0])


def reload_frozen(vm: Machine) -> tuple[list[str], str]:
    """Freeze the daemon's control group during a reload; return the unit's states then, and what systemctl said after.

    systemd follows its signal with SIGCONT, so a daemon that is only stopped would go on.
    """
    group = f"/sys/fs/cgroup{shown(vm, 'ControlGroup')[0]}"
    vm.run(f"echo 1 > {group}/cgroup.freeze")
    try:
        vm.eventually(f"grep -x 'frozen 1' {group}/cgroup.events")
        command = vm.start("timeout 20 systemctl reload kvprefetchd && echo reloaded")
        vm.eventually("systemctl show -p ActiveState kvprefetchd | grep reloading")
        vm.run("sleep 1")
        states = shown(vm, "ActiveState", "SubState")
        assert command.poll() is None
    finally:
        vm.run(f"echo 0 > {group}/cgroup.freeze")
    return states, command.communicate(timeout=60)[0]


def failing(vm: Machine, script: str, *, user: str = "root") -> str:
    with pytest.raises(AssertionError, match=r"^exit status") as caught:
        vm.run(script, user=user)
    return str(caught.value)


def reached(vm: Machine, port: int, *, far: bool) -> bool:
    """Whether a connection to this machine's own address succeeds, from here or from behind the link."""
    code = f"import socket; socket.create_connection(('{OURS}', {port}), 2)"
    said = vm.run(f'{"ip netns exec far " if far else ""}python3 -c "{code}" 2>&1 || true')
    return "Error" not in said


def open_ports(vm: Machine) -> list[int]:
    """Ports on which the daemon or its store listens for all addresses or for an interface."""
    said = vm.run("ss -Hltn")
    return [int(port) for port in re.findall(r"(?:0\.0\.0\.0|\*|\[::\])(?:%\w+)?:(\d+) ", said)]
