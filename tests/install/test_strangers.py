"""Two strangers with the documents alone: a first hit, and two faults.

They need no root of their own: fresh environments in an empty folder, as an ordinary user. tests/test_empty_root.py has
the same in an empty Debian root.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.lab.daemon import Daemon
from tests.lab.process import free_ports
from tests.support.command import COMMAND
from tests.support.empty_root import put_checkout
from tests.support.ordinary import AS_NOBODY, NOBODY
from tests.support.pages import ROOT

FIRST_S = 600.0  # to a first hit
FAULT_S = 60.0  # until a fault is found
# The only commands that the operator uses.
LOOKS = (("health",), ("status",), ("top", "--once", "--interval", "0.2"))


class Stranger:
    """An ordinary user with a clone in an otherwise empty home folder."""

    def __init__(self, home: Path) -> None:
        self.home, self.clone = home, home / "clone"
        put_checkout(ROOT, self.clone)
        own = {
            name: value for name, value in os.environ.items() if not name.startswith(("KVPREFETCH", "PYTHON", "XDG_"))
        }
        self._environ = own | {
            "HOME": str(home),
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "KVPREFETCHD_METRICS_PORT": "0",
            "XDG_RUNTIME_DIR": str(home),
        }
        pip = Path.home() / ".config/pip/pip.conf"  # how this machine reaches an index
        self._environ |= {"PIP_CONFIG_FILE": str(pip)} if pip.exists() else {}
        if AS_NOBODY:
            for path in (home, *home.rglob("*")):
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)

    def run(self, script: str, timeout_s: float) -> str:
        """Run a bash script in the clone; return what it said."""
        with tempfile.TemporaryFile("w+") as output:  # a pipe would wait for what the script leaves running
            child = subprocess.Popen(
                [*AS_NOBODY, "bash", "-ec", script],
                cwd=self.clone,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = child.wait(timeout_s)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGTERM)
                    time.sleep(2)
                    os.killpg(child.pid, signal.SIGKILL)
            output.seek(0)
            said = output.read()
        assert status == 0, said[-4000:]
        return said


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    home = Path(tempfile.mkdtemp(prefix="kvs-"))  # the path of a socket has a bound
    home.chmod(0o755)
    yield Stranger(home)
    shutil.rmtree(home)


def find(socket: Path, words: str, *, before: tuple[str, ...] = ()) -> None:
    """Look until one of LOOKS says these words."""
    begun, said = time.monotonic(), ""
    while time.monotonic() < begun + FAULT_S:
        for look in LOOKS:
            done = subprocess.run([*before, *COMMAND, *look, "--socket", socket], capture_output=True, timeout=60)
            said = (done.stdout + done.stderr).decode()
            if words in said:
                return
    raise AssertionError(f"{words!r} not within {FAULT_S:.0f} s; the last look said:\n{said}")


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[Daemon]:
    """A daemon that the operator has seen ready."""
    with Daemon(staging="1MiB", **options) as daemon:
        subprocess.run([*COMMAND, "health", "--wait", "60", "--socket", daemon.socket], check=True, capture_output=True)
        yield daemon


@pytest.mark.store
def test_an_operator_finds_a_full_disk_within_a_minute(tmp_path: Path) -> None:
    """By `health`, `status` or `top` alone, which say it in words; tests/daemon has other faults."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=400m,mode=0700", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("may not mount here")
    try:
        with serving(memory="64MiB", disk=f"{tmp_path}:100MiB") as daemon:
            (tmp_path / "of-another").write_bytes(bytes(300 << 20))
            find(daemon.socket, "make room, or choose a smaller size")
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.store
@pytest.mark.skipif(not AS_NOBODY, reason="needs root, to be another user")
def test_a_user_without_rights_to_the_socket_is_told_so_within_a_minute() -> None:
    with serving(memory="64MiB") as daemon:
        daemon.socket.parent.chmod(0o755)
        find(daemon.socket, "Permission denied", before=tuple(AS_NOBODY))


@pytest.mark.stress
@pytest.mark.vllm
@pytest.mark.store
@pytest.mark.timeout(1800)
def test_a_newcomer_has_a_first_hit_within_ten_minutes(stranger: Stranger) -> None:
    """README's lines, one after the other: after a restart of the engine the same prompt is loaded from the store."""
    from tests.lab.checkpoint import TINY, make_checkpoint

    text = (ROOT / "README.md").read_text()
    install, serve, ask = text.split("## Start\n")[1].split("```sh\n")[1].split("\n```")[0].splitlines()
    model = make_checkpoint(stranger.home / "models", TINY)
    vllm = serve.replace("MODEL", f"{model} --served-model-name tiny --enforce-eager --port $PORT", 1)
    vllm = vllm.replace('"start_daemon":true', '"start_daemon":{"log_level":"info"}')
    engine = find_spec("vllm")
    assert engine is not None
    assert engine.origin is not None
    said = stranger.run(NEWCOMER.format(
        python=sys.executable, site=Path(engine.origin).parents[1], port=free_ports(1)[0], install=install, vllm=vllm,
        ask=ask.replace("MODEL", "tiny").replace(":8000", ":$PORT"),
    ), FIRST_S)  # fmt: skip
    assert "kvprefetch: first save: " in said
    assert re.search(r"kvprefetch: first prefix from the store: \d+ of \d+ tokens", said)
    assert re.search(r"request\.done .* loaded: [1-9]\d* of \d+ blocks", said), said[-4000:]


# The environment of vLLM is the one that the tests have, without its kvprefetch. vLLM's build for CPUs has no `vllm
# serve` (docs/tutorial.md).
NEWCOMER = """
export PORT={port}
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_NUM_OF_RESERVED_CPU=1 VLLM_NO_USAGE_STATS=1
{python} -m venv ~/engine
echo {site} > $(~/engine/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm.pth
SERVER='exec ~/engine/bin/python -m vllm.entrypoints.openai.api_server --model "$@"'
printf '#!/bin/sh\\nshift\\n%s\\n' "$SERVER" > ~/engine/bin/vllm
chmod +x ~/engine/bin/vllm
PATH=~/engine/bin:$PATH
{install}
for life in "first save" "first prefix"; do
    {vllm} >> vllm.log 2>&1 & ENGINE=$!
    until ~/engine/bin/kvprefetchd health --engines 1 && curl -sf localhost:$PORT/health; do
        sleep 1; kill -0 $ENGINE || {{ tail -50 vllm.log; exit 1; }}
    done
    {ask}
    until grep "kvprefetch: $life" vllm.log; do sleep 0.2; done
    kill $ENGINE && wait
done
~/engine/bin/kvprefetchd tail --event request.done ~/.local/state/kvprefetch/kvprefetchd.log
"""
