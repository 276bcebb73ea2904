"""The one line for one user: the daemon that an engine starts, with a home or without, beside the system's."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import process
from tests.support.empty_root import NO_COMPILER, EmptyRoot, missing, put_checkout
from tests.support.ordinary import AS_NOBODY

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"memory": "64MiB", "staging": "1MiB", "exit_idle_s": 60}
KV = {
    "kv_connector": "KVPrefetchConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"start_daemon": OPTIONS},
}
START = f"""
from kvprefetch.connector.attach.starter import Starter
made = Starter({OPTIONS}, None)  # as an engine does
made.start()
print("started:", made)
"""
# A machine of its own, but for its programs: empty /run, /tmp and users' folders.
SCRIPT = """
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777,size=8g tmpfs /tmp
mkdir -m 700 /tmp/home; chown 65534:65534 /tmp/home
as() { home=$1; shift; "${AS[@]}" env -i PATH="$PATH" HOME="$home" PYTHONDONTWRITEBYTECODE=1 "$@"; }
k() { as "$1" "$PYTHON" -m kvprefetch.daemon "${@:2}"; }
doctor() { k "$1" doctor --engine --kv-transfer-config "$KV" | grep -A1 ' daemon '; }
"""
pytestmark = [
    pytest.mark.store,
    pytest.mark.skipif(not AS_NOBODY or shutil.which("unshare") is None, reason="needs root, and unshare"),
]


def run(script: str) -> str:
    named = {"PYTHON": sys.executable, "KV": json.dumps(KV), "START": START}
    text = "\n".join([f"AS=({shlex.join(AS_NOBODY)})", SCRIPT, script])
    alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-ec", text]
    done = subprocess.run(
        alone,
        cwd=ROOT,
        env=named | {"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_user_s_engine_starts_a_daemon_and_finds_the_system_s_where_that_answers() -> None:
    """`doctor --engine` says before what the engine does, and then which daemon answers; commands find the same one."""
    said = run("""
doctor /tmp/home
as /tmp/home "$PYTHON" -c "$START"
k /tmp/home health --wait 20
mkdir /run/kvprefetch
"$PYTHON" -m kvprefetch.daemon serve --memory 64MiB --staging 1MiB --metrics-port 0 >/dev/null 2>&1 &
"$PYTHON" -m kvprefetch.daemon health --wait 20
doctor /tmp/home
echo 'and for all:'
chmod 666 /run/kvprefetch/kvprefetchd.sock
doctor /tmp/home
k /tmp/home health
""")
    place = "socket /tmp/kvprefetch-65534/kvprefetchd.sock, disk /tmp/home/.local/share/kvprefetch:1"
    assert f"the engine starts a daemon: {place}" in said
    assert f"started: {place}" in said
    assert "log /tmp/home/.local/state/kvprefetch/kvprefetchd.log" in said
    both, refusing = said.split("and for all:")
    assert "this user may not use the socket: socket='/run/kvprefetch/kvprefetchd.sock'" in both
    assert "answers at /tmp/kvprefetch-65534/kvprefetchd.sock" in both.split("this user may not")[1]
    passed, answers = refusing.split("note")[1].split("answers at /tmp/kvprefetch-65534/kvprefetchd.sock: pid ")
    assert "it refuses this user: uid=65534 may not attach" in passed
    assert f"ready: pid {answers.split(',')[0]}, " in answers, "commands find the same one"


@pytest.mark.stress
def test_a_user_without_a_home_has_a_daemon_in_memory_but_none_in_a_folder_that_another_took() -> None:
    said = run("""
mkdir -m 755 /tmp/kvprefetch-65534
chown 4242 /tmp/kvprefetch-65534
k /nonexistent serve 2>&1 || echo "status $?"
doctor /nonexistent || true
rmdir /tmp/kvprefetch-65534
as /nonexistent "$PYTHON" -c "$START"
k /nonexistent health --wait 20
ls /tmp/kvprefetch-65534
""")
    taken, served = said.split("started: ")
    assert (
        "socket: other users could replace it in its folder: socket='/tmp/kvprefetch-65534/kvprefetchd.sock'" in taken
    )
    assert "status 78" in taken
    assert served.startswith(
        "socket /tmp/kvprefetch-65534/kvprefetchd.sock, disk none, in memory alone, log /tmp/kvpre"
    )
    assert "kvprefetchd.log\nkvprefetchd.sock" in served


@pytest.mark.stress
def test_a_machine_without_mooncake_s_libraries_is_told_root_s_command_at_once() -> None:
    """By `serve`, and by `doctor --engine` and an engine's start, which try to load what the daemon loads."""
    said = run("""
library=$(ldconfig -p | sed -n 's/.*libibverbs.so.1 .*=> //p' | head -1)
mount --bind /dev/null "$(readlink -f "$library")"
began=$SECONDS
k /tmp/home serve --memory 64MiB --staging 1MiB --metrics-port 0 2>&1 >/dev/null || echo "status $?"
k /tmp/home doctor --engine --kv-transfer-config "$KV" | grep '^bad' || true
as /tmp/home "$PYTHON" -c "$START" 2>&1 | tail -1
echo "took $((SECONDS - began)) s"
""")
    assert "status 69" in said
    assert said.count("libibverbs.so.1: file too short") == said.count("as root: apt-get install -y libibverbs1") == 3
    assert int(re.findall(r"took (\d+) s", said)[0]) < 45, "three starts of Python, none of which waits"


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_an_empty_root_serves_from_a_wheel_after_root_s_one_command() -> None:
    """Without a compiler. `serve` ends within ten seconds with the command; then an engine's daemon starts."""
    if why := missing():
        pytest.skip(why)
    folder = process.scratch("root")
    folder.chmod(0o755)
    root = EmptyRoot(folder / "debian")
    try:
        put_checkout(ROOT, folder / "clone")
        build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
        subprocess.run([*build, "-w", root.path / "srv", folder / "clone"], check=True, timeout=300)
        root.run("apt-get update; apt-get install -y --no-install-recommends python3-venv", timeout_s=900)
        root.run(f"{NO_COMPILER}; useradd --create-home somebody", timeout_s=60)
        as_user = "cd; HOME=/home/somebody setpriv --reuid=somebody --regid=somebody --init-groups bash -ec"
        said = root.run(f"""{as_user} '
cd; python3 -m venv engine
engine/bin/pip install --no-cache-dir "$(ls /srv/kvprefetch-*.whl)[daemon-cpu]"
timeout 10 engine/bin/kvprefetchd serve || echo "status $?"
'""", timeout_s=900)  # fmt: skip
        assert "status 69" in said
        command = re.search(r"^kvprefetchd: .* as root: (.*)$", said, re.MULTILINE)
        assert command is not None, said[-2000:]
        root.run(command[1], timeout_s=300)
        said = root.run(f"""{as_user} '
cd; engine/bin/python -c "$1"
engine/bin/kvprefetchd health --wait 20
engine/bin/kvprefetchd status
' bash {shlex.quote(START)}""", timeout_s=120)  # fmt: skip
        assert "started: socket /tmp/kvprefetch-" in said
        assert "log /home/somebody/.local/state/kvprefetch/kvprefetchd.log" in said
        assert "ready: pid " in said
    finally:
        root.remove()
        shutil.rmtree(folder)
