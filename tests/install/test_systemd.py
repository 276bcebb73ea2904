"""docs/install/systemd.md from nothing to serving and away again, and the unit under a real systemd in between.

One Debian root for all tests of this file, in which the page's commands run. The last test removes everything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.install import probe
from tests.install.conftest import Checkout
from tests.install.service import (
    CHECKOUT,
    DROP_INS,
    ENGINE,
    LINK,
    OTHER,
    PAGE,
    PROBE,
    configure,
    drop_in,
    engine,
    failing,
    installed,
    open_ports,
    pid,
    reached,
    ready,
    reload_frozen,
    running,
    shown,
)
from tests.support.empty_root import EmptyRoot
from tests.support.machine import Machine
from tests.support.pages import blocks, files, traces

FROM_MEMORY, FROM_DISK = "0 of 8 from disk\n", "8 of 8 from disk\n"
pytestmark = [pytest.mark.stress, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def there(released: tuple[Checkout, str]) -> Iterator[tuple[Machine, EmptyRoot, dict[str, str]]]:
    """The machine on which the page's commands ran, up to a daemon that serves."""
    with installed(released[0]) as (root, before), Machine(root) as booted:
        serve, *_ = blocks(PAGE, "booted")
        said = booted.run(f"{LINK}\n{serve}")
        assert re.search(r"^ready: pid \d+, mode on", said, re.MULTILINE), said
        yield booted, root, before


@pytest.fixture
def vm(there: tuple[Machine, EmptyRoot, dict[str, str]]) -> Iterator[Machine]:
    """That machine with its daemon up and a small configuration; what a test changes is taken back."""
    booted, _, _ = there
    units = "/etc/systemd/system"
    configure(booted)
    booted.run(f"systemctl restart kvprefetchd\nmkdir -p /tmp/units && cp -r {units}/. /tmp/units")
    yield booted
    booted.run(
        f"systemctl stop kvprefetchd.socket kvprefetchd || true\nrm -rf {DROP_INS} {units}/kvprefetchd.*\n"
        f"cp -r /tmp/units/. {units} && rm -rf /tmp/units /var/lib/kvprefetch/*\nsystemctl daemon-reload\n"
        "systemctl reset-failed kvprefetchd || true"
    )


def test_engines_of_the_group_are_served_and_others_are_not(vm: Machine) -> None:
    """The page's third step lets an engine of another user in, and its last one shows what it did."""
    _, join, look, _ = blocks(PAGE, "booted")
    assert "Permission denied" in failing(vm, engine("save", "early"), user="engine")
    vm.run(f"ENGINE_USER=engine\n{join}")
    assert vm.run(engine("save", "first"), user="engine") == FROM_MEMORY
    assert "Permission denied" in failing(vm, engine("load", "first"), user="stranger")
    said = vm.run(look)
    assert re.search(r"request\.done .* request-first loaded: 8 of 8 blocks", said), said


def test_doctor_of_an_engine_s_user_finds_the_daemon(vm: Machine) -> None:
    vm.run("usermod -aG kvprefetch engine")
    said = failing(vm, f"{ENGINE}/bin/kvprefetchd doctor --engine", user="engine")  # no vLLM is there
    assert re.search(r"^ok .*kvprefetchd\.sock", said, re.MULTILINE), said


def test_a_reload_is_taken_over_where_no_kill_is_installed(vm: Machine) -> None:
    """Debian has /bin/kill in procps, which this machine does not have."""
    assert "exit status" in failing(vm, "test -e /bin/kill || test -e /usr/bin/kill")
    before = pid(vm)
    configure(vm, 'mode = "shadow"')
    vm.run("systemctl reload kvprefetchd")
    vm.eventually("kvprefetchd status | grep -q shadow")
    assert pid(vm) == before
    vm.eventually("systemctl is-active kvprefetchd")


def test_a_killed_daemon_comes_back(vm: Machine) -> None:
    before = pid(vm)
    drop_in(vm, "RestartSec=1")
    vm.run("systemctl kill --kill-whom=main -s KILL kvprefetchd")
    vm.eventually("test $(systemctl show --value -p NRestarts kvprefetchd) = 1 && systemctl is-active kvprefetchd")
    assert pid(vm) != before
    assert vm.run(engine("save", "again")) == FROM_MEMORY
    assert sorted(running(vm)) == ["kvprefetchd", "mooncake_master"]


def test_a_daemon_that_hangs_is_killed_and_comes_back(vm: Machine) -> None:
    """SIGSTOP stands for a hung loop; the loop's silence alone is tested in tests/daemon/runtime."""
    drop_in(vm, "RestartSec=1", "WatchdogSec=3")
    vm.run("systemctl restart kvprefetchd")
    before = pid(vm)
    vm.run("sleep 5; systemctl is-active kvprefetchd")
    assert pid(vm) == before, "the loop feeds a watchdog of 3 s"
    vm.run("systemctl kill --kill-whom=main -s STOP kvprefetchd")
    vm.eventually("test $(systemctl show --value -p NRestarts kvprefetchd) = 1 && systemctl is-active kvprefetchd")
    assert pid(vm) != before
    vm.run("journalctl -u kvprefetchd -b | grep -q 'Watchdog timeout'")
    ready(vm)


def test_a_stop_writes_to_the_disk_and_a_start_finds_it(vm: Machine) -> None:
    configure(vm, 'disk = "/var/lib/kvprefetch/disk:256MiB"')
    vm.run("systemctl restart kvprefetchd")
    assert vm.run(engine("save-and-stop", "kept")) == FROM_MEMORY
    assert shown(vm, "ActiveState", "Result") == ["inactive", "success"]
    vm.run("systemctl start kvprefetchd")
    assert vm.run(engine("load", "kept")) == FROM_DISK
    folder = "/var/lib/kvprefetch"
    closed = vm.run(f"stat -c '%a %U' {folder} {folder}/disk; find {folder}/disk -type f -perm /077")
    assert closed == "700 kvprefetch\n" * 2


def test_a_bad_configuration_is_not_tried_again(vm: Machine) -> None:
    configure(vm, "max_engine = 1")
    drop_in(vm, "RestartSec=1")
    failing(vm, "systemctl restart kvprefetchd")
    assert shown(vm, "ExecMainStatus", "ActiveState") == ["78", "failed"]
    vm.run("sleep 4")
    assert shown(vm, "ExecMainStatus", "ActiveState", "NRestarts") == ["78", "failed", "0"]
    assert "did you mean max_engines?" in vm.run("journalctl -u kvprefetchd -b -n 20")


def test_a_taken_port_is_tried_again(vm: Machine) -> None:
    drop_in(vm, "RestartSec=1")
    vm.run("systemctl stop kvprefetchd")
    holder = vm.start("exec python3 -m http.server 9655 --bind 127.0.0.1")
    try:
        vm.eventually("ss -ltn | grep -q :9655")
        vm.run("systemctl start --no-block kvprefetchd")
        vm.eventually("test $(systemctl show --value -p NRestarts kvprefetchd) -ge 2")
        assert shown(vm, "ExecMainStatus")[0] in ("69", "0")  # 0 while it starts
        assert "metrics_port: cannot be bound" in vm.run("journalctl -u kvprefetchd -b -n 50")
    finally:
        vm.end(holder)
    ready(vm)


def activate(vm: Machine) -> None:
    """Let systemd hold the socket, and the daemon wait for a connection."""
    vm.run("systemctl stop kvprefetchd; kvprefetchd install-unit --activation")
    vm.run("systemctl daemon-reload && systemctl start kvprefetchd.socket")


def test_a_socket_unit_keeps_engines_waiting_over_a_restart(vm: Machine) -> None:
    """The first connection starts the daemon; none is refused while it restarts, by a command or after a SIGKILL."""
    activate(vm)
    assert shown(vm, "ActiveState") == ["inactive"]
    assert vm.run(engine("save", "waking")) == FROM_MEMORY
    knocking = vm.start(f"rm -f /tmp/over\n{engine('knock', '/tmp/over')}")
    try:
        for how in ("systemctl restart --no-block kvprefetchd", "systemctl kill --kill-whom=main -s KILL kvprefetchd"):
            before = pid(vm)
            vm.run(how)
            assert vm.run(engine("save", "waiting")) == FROM_MEMORY
            assert pid(vm) != before
    finally:
        vm.run("touch /tmp/over")
        said = knocking.communicate(timeout=60)[0]
    assert re.fullmatch(r"connected \d+ times\n", said), said
    assert vm.run("stat -c '%a %U:%G' /run/kvprefetch/kvprefetchd.sock") == "660 kvprefetch:kvprefetch\n"


def test_connections_do_not_start_a_bad_configuration_in_a_loop(vm: Machine) -> None:
    activate(vm)
    configure(vm, "max_engine = 1")
    knocking = vm.start(f"rm -f /tmp/over\n{engine('knock', '/tmp/over')} || true")
    vm.run("sleep 8; touch /tmp/over")
    knocking.communicate(timeout=60)
    assert 1 <= int(vm.run("journalctl -u kvprefetchd -b | grep -c 'did you mean max_engines'")) <= 4


def test_the_journal_is_read_as_a_log_is(vm: Machine) -> None:
    vm.run(engine("save", "journal"))
    said = vm.eventually("kvprefetchd tail --journal --event request.done -n 100 | grep request-journal")
    assert "loaded: 8 of 8 blocks" in said
    assert "request request-journal of engine" in vm.run("kvprefetchd explain request-journal --journal")
    assert "not for this user to read" in failing(vm, "kvprefetchd tail --journal", user="stranger")
    assert vm.run("journalctl -u kvprefetchd -b -p warning -o cat | grep -c request.done || true") == "0\n"


def test_a_log_in_files_is_rotated_while_it_is_followed_and_appended_to_by_a_restart(vm: Machine) -> None:
    """`install-unit --logfile`, and Debian's own logrotate.service with a state that says a day is over."""
    folder = "/var/log/kvprefetch"
    log = f"{folder}/kvprefetchd.log"
    vm.run("kvprefetchd install-unit --logfile\nsystemctl daemon-reload\nsystemctl restart kvprefetchd")
    ready(vm)
    assert log in vm.run("kvprefetchd status")
    follower = vm.start(f"exec kvprefetchd tail -f --event request.done {log} > /tmp/followed")

    def saved(name: str) -> None:
        """A request's line is in the file that has the log's name now, and nowhere in the journal."""
        assert vm.run(engine("save", name)) == FROM_MEMORY
        vm.eventually(f"grep request-{name} {log}")

    before = pid(vm)
    saved("first")
    vm.run("systemctl reload kvprefetchd")
    saved("reloaded")
    for number in range(1, 4):
        state = f"""logrotate state -- version 2\n"{log}" 2020-1-1-0:0:0"""
        vm.run(f"umask 077; echo '{state}' > /var/lib/logrotate/status\nsystemctl start logrotate")
        saved(f"rotated-{number}")
    assert vm.run(f"cd {folder}; ls").split() == [f"kvprefetchd.log{each}" for each in ("", ".1", ".2.gz", ".3.gz")]
    assert vm.run(f"stat -c '%a %U:%G' {folder}/*") == "640 kvprefetch:kvprefetch\n" * 4
    assert vm.run(f"cat {log}* | grep -c log.kept || true") == "0\n"
    assert pid(vm) == before
    vm.run("systemctl restart kvprefetchd")
    ready(vm)
    saved("restarted")
    vm.run(f"grep request-rotated-3 {log}")
    assert vm.run("journalctl -u kvprefetchd -b -o cat | grep -c request-first || true") == "0\n"
    said = vm.eventually("grep -q request-restarted /tmp/followed && cat /tmp/followed")
    Machine.end(follower)
    found = re.findall(r"request\.done .* request-(\S+)", said)
    assert [*dict.fromkeys(found)] == ["first", "reloaded", "rotated-1", "rotated-2", "rotated-3", "restarted"], said
    vm.run(f"rm {folder}/*")


@pytest.mark.parametrize("names", [(), ("gpu",), ("rdma",), ("cluster",), ("gpu", "rdma", "cluster")], ids=" ".join)
def test_the_sandbox_denies_what_the_daemon_does_not_need(vm: Machine, names: tuple[str, ...]) -> None:
    """Each try is allowed for root outside. A drop-in opens what it is for, and nothing else."""
    vm.run(f"kvprefetchd install-unit {' '.join(f'--{name}' for name in names)}")
    others = " ".join(f"{folder}/{probe.OPEN}" for folder in (*probe.FOLDERS, "/home", "/tmp"))
    vm.run(f"mkdir -p -m 777 {others}; rm -f /dev/{probe.OPEN}; mknod -m 666 /dev/{probe.OPEN} c 1 5")
    outside = json.loads(vm.run(f"python3 {PROBE}"))
    assert {what for what in outside if outside[what] != "allowed"} - {"write its folders"} == set()
    drop_in(vm, f"ExecStartPre=/usr/bin/python3 {PROBE} /var/lib/kvprefetch/probe.json")
    vm.run("systemctl restart kvprefetchd")
    ready(vm)
    inside = json.loads(vm.run("cat /var/lib/kvprefetch/probe.json"))
    assert {what: inside[what] for what in probe.NEEDED} == dict.fromkeys(probe.NEEDED, "allowed")
    opened = {"send to another machine"}  # this machine's systemd has no BPF: see the test of the data port
    opened |= {"memory to write and execute"} if "gpu" in names else set()
    opened |= {"open a device"} if {"gpu", "rdma"} & {*names} else set()  # DevicePolicy=closed allows that one
    assert {what for what in probe.TRIES if inside[what] == "allowed"} == opened
    assert vm.run(engine("save", "boxed")) == FROM_MEMORY
    vm.run(f"rmdir {others}")


@pytest.mark.parametrize("cluster", [False, True], ids=["alone", "with the drop-in of clusters"])
def test_the_data_port_is_closed_to_others_without_bpf(vm: Machine, cluster: bool) -> None:
    """The daemon binds Mooncake's sockets to loopback itself; its own socket shows that the link works."""
    if cluster:
        vm.run("kvprefetchd install-unit --cluster")
    configure(vm, 'metrics_address = "0.0.0.0"')
    vm.run("systemctl daemon-reload; systemctl restart kvprefetchd")
    ready(vm)
    ports = open_ports(vm)
    assert 9655 in ports
    assert len(ports) >= 3, "Mooncake's data and handshakes"
    assert [port for port in ports if reached(vm, port, far=True)] == [9655]
    assert vm.run("journalctl -u kvprefetchd -b -o cat | grep -c store.exposed || true") == "0\n"


def test_a_user_s_own_unit(vm: Machine) -> None:
    """`install-unit --user`, under the user's systemd: served, reloaded, and removed."""
    vm.run("systemctl start user@$(id -u engine)")
    as_user = "export HOME=/home/engine XDG_RUNTIME_DIR=/run/user/$(id -u) PATH=/opt/kvprefetch/bin:$PATH\n"
    vm.run("systemctl stop kvprefetchd")
    written = vm.run(f"{as_user}kvprefetchd install-unit --user", user="engine")
    for line in re.findall(r"^  (systemctl .*)$", written, re.MULTILINE):
        vm.run(as_user + line, user="engine")
    vm.run(f"{as_user}kvprefetchd health --wait 60\nsystemctl --user reload kvprefetchd", user="engine")
    vm.run(f"{as_user}systemctl --user is-active kvprefetchd\nkvprefetchd status", user="engine")
    vm.run(f"{as_user}systemctl --user disable --now kvprefetchd\nrm -r ~/.config", user="engine")
    vm.run("systemctl stop user@$(id -u engine)")


@pytest.fixture(scope="module")
def newer(released: tuple[Checkout, str]) -> Iterator[Machine]:
    """The same on the next Debian, with a systemd of 253 or later that may filter by BPF."""
    with installed(released[0], "trixie") as (root, _), Machine(root, bpf=True) as booted:
        booted.run(f"{LINK}\n{blocks(PAGE, 'booted')[0]}")
        yield booted


def test_a_newer_systemd_waits_for_the_reload(newer: Machine) -> None:
    assert newer.run("systemctl show -p Type -p ExecReload kvprefetchd") == "Type=notify-reload\n"
    for mode in ("shadow", "on", "off", "on"):
        configure(newer, f'mode = "{mode}"')
        newer.run("systemctl reload kvprefetchd")
        assert re.search(rf"\bmode:? +{mode}\b", newer.run("kvprefetchd status"))
    assert shown(newer, "NRestarts", "ActiveState") == ["0", "active"]


def test_a_reload_lasts_until_a_frozen_daemon_goes_on(newer: Machine) -> None:
    """systemd shows it as `reloading`, and `systemctl reload` returns with the new configuration in force."""
    configure(newer, 'mode = "shadow"')
    assert reload_frozen(newer) == (["reloading", "reload-signal"], "reloaded\n")
    assert shown(newer, "ActiveState", "SubState") == ["active", "running"]
    assert re.search(r"\bmode:? +shadow\b", newer.run("kvprefetchd status"))


def test_the_data_port_is_closed_to_others_with_bpf(newer: Machine) -> None:
    """systemd's filter keeps the whole service on loopback, its metrics too. The drop-in of clusters lifts the filter,
    and the sockets stay bound."""
    sends = f"import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('{OTHER}', 9))"
    filtered = f'systemd-run -q --wait -p IPAddressDeny=any python3 -c "{sends}"'
    if "sent" in newer.run(f"{filtered} && echo sent || echo refused"):
        pytest.skip("this kernel filters no control group's traffic (CONFIG_CGROUP_BPF)")
    for cluster, open_to_all in ((False, []), (True, [9655])):
        newer.run(f"kvprefetchd install-unit {'--cluster' * cluster}; systemctl daemon-reload")
        configure(newer, 'metrics_address = "0.0.0.0"')
        drop_in(newer, f"ExecStartPre=/usr/bin/python3 {PROBE} /var/lib/kvprefetch/probe.json")
        newer.run("systemctl restart kvprefetchd")
        ready(newer)
        assert [port for port in open_ports(newer) if reached(newer, port, far=True)] == open_to_all
        sent = json.loads(newer.run("cat /var/lib/kvprefetch/probe.json"))["send to another machine"]
        assert sent == ("allowed" if cluster else "EPERM")
        assert newer.run(engine("save", f"filtered-{cluster}")) == FROM_MEMORY


def test_removed_by_the_page_nothing_is_left(there: tuple[Machine, EmptyRoot, dict[str, str]]) -> None:
    """Files, users, groups, units, shared memory, sockets, processes: all as before the installation."""
    booted, root, before = there
    booted.run(f"usermod -aG kvprefetch engine\nsystemctl restart kvprefetchd\n{engine('save', 'last')}")
    booted.run(blocks(PAGE, "booted")[-1])
    folders = "/run /tmp /var/tmp /dev/shm /var/lib/systemd"
    assert booted.run(f"find {folders} -iname '*kvprefetch*' -o -iname '*mooncake*'") == ""
    assert booted.run("systemctl list-units --all --plain --no-legend 'kvprefetch*'") == ""
    assert booted.run("ls /dev/shm") == ""
    assert running(booted) == []
    assert "\n".join(traces(before, files(root.path, CHECKOUT.lstrip("/")))) == ""
