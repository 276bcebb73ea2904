"""Ranks that Ray started: served on the scheduler's node, refused in one line on several."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Site, hits, served
from tests.e2e.elsewhere_connector import WHO
from tests.e2e.test_nodes import ELSEWHERE
from tests.lab.checkpoint import TINY_TP2, make_checkpoint
from tests.lab.connectors import ours
from tests.lab.engine import Engine, EngineError, EngineSpec
from tests.lab.prompts import make_prompts
from tests.support.compiler import needs_cxx

pytestmark = pytest.mark.stress  # Ray's processes import vLLM anew for each engine: minutes on two cores

pytest.importorskip("ray", reason="Ray is not installed")
PROMPTS = make_prompts(4, 300, seed=1)

# vLLM has Ray place ranks by their GPUs, and knows no such thing for CPUs.
CPUS_ARE_GPUS = """
import importlib.abc, importlib.machinery, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "vllm.platforms.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.CpuPlatform.ray_device_key = "GPU"

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of the engine and, as Ray's processes inherit it, of its ranks."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CPUS_ARE_GPUS)
    paths = [str(folder), str(Path.cwd()), os.environ.get("PYTHONPATH")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), WHO: "1", "RAY_USAGE_STATS_ENABLED": "0"}
    env["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="kvl-")  # short: it holds Unix sockets
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return env


@pytest.fixture
def cluster_of(environment: dict[str, str]) -> Iterator[Callable[..., dict[str, str]]]:
    """cluster_of(1, 1): what engines need of the environment for Ray nodes on this machine, with so many GPUs each."""
    from ray.cluster_utils import Cluster

    clusters = []
    folder = Path(environment["RAY_TMPDIR"])

    def start(*gpus: int) -> dict[str, str]:
        (folder / "ray").mkdir()  # where Ray notes its newest cluster
        options = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 << 20}
        cluster = Cluster(initialize_head=True, head_node_args={**options, "num_gpus": gpus[0]})
        clusters.append(cluster)
        for count in gpus[1:]:
            cluster.add_node(**options, num_gpus=count)
        return {**environment, "RAY_ADDRESS": cluster.address}

    yield start
    for cluster in clusters:
        cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def spec(folder: Path, env: dict[str, str], kv_transfer: dict[str, Any]) -> EngineSpec:
    model = make_checkpoint(folder, TINY_TP2)
    ray = {"distributed_executor_backend": "ray"}
    return EngineSpec(model=model, tensor_parallel_size=2, kv_transfer=kv_transfer, env=env, extra=ray)


@needs_cxx
@pytest.mark.shows("ranks that Ray started on one node")
def test_ranks_that_ray_started_on_one_node_are_served(
    site: Site, tmp_path: Path, cluster_of: Callable[..., dict[str, str]]
) -> None:
    engine = site.engine(spec(tmp_path, cluster_of(2), ours(site.daemon.socket)))
    assert engine.call("tests.e2e.probes:workers_found") == [True, True]
    right = engine.run(PROMPTS).tokens
    site.fresh(engine)
    served(engine.run(PROMPTS), right, hits(PROMPTS))
    site.assert_idle()
    engine.stop()


@needs_cxx
@pytest.mark.shows("ranks on another node", refused=True)
def test_a_rank_that_ray_started_on_another_node_is_refused_in_one_line(
    site: Site, engines: Callable[..., Engine], tmp_path: Path, cluster_of: Callable[..., dict[str, str]]
) -> None:
    """Ray places a rank on each of its two nodes; the second has another boot id."""
    with pytest.raises(EngineError) as caught:
        engines(spec(tmp_path, cluster_of(1, 1), {**ours(site.daemon.socket), **ELSEWHERE}), attached=False)
    lines = re.findall(r"KVPrefetchConnector: .*an engine's ranks must be on the node .*", str(caught.value))
    assert any("tp_rank=1 is on node" in line and "distributed_executor_backend=ray (give" in line for line in lines)
    site.assert_idle()
