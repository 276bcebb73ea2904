"""The suite is green on a machine where a user's own daemon runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.lab.process import REPO
from tests.support.command import COMMAND

# Network, /run and processes of its own: this daemon has all defaults and meets no real one.
ALONE = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--net", "--mount", "--pid", "--fork"]
ALONE += ["--mount-proc", "--kill-child=KILL", "sh", "-ec"]
# Tests of commands that take the port, or look for a daemon, without being told which.
TESTS = ("tests/test_operations.py", "-k", "doctor")


@pytest.mark.store
def test_commands_under_test_keep_away_from_a_user_s_daemon() -> None:
    """Tests pass beside `kvprefetchd serve` with every default: its port, its socket and its store."""
    if subprocess.run([*ALONE, "ip link set lo up"], capture_output=True, check=False).returncode:
        pytest.skip("this user may make no namespaces, or iproute2 is not installed")
    ours = {"XDG_RUNTIME_DIR", "KVPREFETCHD_SOCKET", "KVPREFETCHD_METRICS_PORT"}
    script = """
        ip link set lo up
        mount -t tmpfs none /run
        $SERVE --memory 64MiB --staging 1MiB > /dev/null 2>&1 &
        $HEALTH --wait 60
        exec "$PYTHON" -m pytest -q -p no:cacheprovider $TESTS
    """
    environ = {
        **{name: value for name, value in os.environ.items() if name not in ours},
        "SERVE": " ".join([*COMMAND, "serve"]),
        "HEALTH": " ".join([*COMMAND, "health"]),
        "PYTHON": sys.executable,
        "TESTS": " ".join(TESTS),
    }
    done = subprocess.run([*ALONE, script], cwd=REPO, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
