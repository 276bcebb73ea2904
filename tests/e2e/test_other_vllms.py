"""Engines of the installed vLLM and of another release share what either stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm

from kvprefetch.connector.compat import TRIED
from tests.e2e.conftest import Site, fingerprint, hits, served
from tests.lab.connectors import ours
from tests.lab.engine import EngineSpec
from tests.lab.prompts import make_prompts

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ".".join(vllm.__version__.split(".")[:2])
PROMPTS = make_prompts(4, 300, seed=5), make_prompts(4, 300, seed=6)


@pytest.mark.shows("one release loads what another stored")
@pytest.mark.parametrize("series", [each for each in TRIED if each != INSTALLED])
def test_what_one_release_stored_another_loads(site: Site, series: str) -> None:
    """Both ways, with equal tokens: the fingerprints are equal."""
    python = ROOT / "build" / "vllm" / series / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment with vLLM {series} (`make test-vllm-versions` builds it)")
    spec = EngineSpec(model=site.model, kv_transfer=ours(site.daemon.socket, cache_prefix=f"vllm-{series}"))
    mine, theirs = site.engine(spec), site.engine(spec.but(python=python))
    assert theirs.call("tests.e2e.probes:vllm_version").startswith(f"{series}.")
    for first, second, prompts in ((mine, theirs, PROMPTS[0]), (theirs, mine, PROMPTS[1])):
        right = first.run(prompts).tokens
        site.fresh(first)
        served(second.run(prompts), right, hits(prompts))
    assert fingerprint(mine) == fingerprint(theirs)
    mine.stop()
    theirs.stop()
