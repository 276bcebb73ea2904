"""An engine with a process on another node ends its start in one line, whatever launched its ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Site
from tests.e2e.elsewhere_connector import WHO
from tests.lab.checkpoint import TINY_TP2, make_checkpoint
from tests.lab.connectors import multi, ours
from tests.lab.engine import Engine, EngineError, EngineSpec
from tests.support.compiler import needs_cxx

ELSEWHERE = {"kv_connector_module_path": "tests.e2e.elsewhere_connector"}


@needs_cxx
@pytest.mark.shows("ranks on another node", refused=True)
def test_an_engine_with_a_process_on_another_node_is_refused_in_one_line(
    site: Site, engines: Callable[..., Engine], tmp_path: Path
) -> None:
    """As MultiConnector's child, which cannot compare the ranks' nodes with the scheduler's.

    tests/connector/test_nodes.py has the others without an engine.
    """
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    mine = {**ours(site.daemon.socket), **ELSEWHERE}
    spec = EngineSpec(
        model=make_checkpoint(tmp_path, TINY_TP2),
        tensor_parallel_size=2,
        kv_transfer=multi(example, mine),
        env={WHO: "1"},
    )
    with pytest.raises(EngineError) as caught:
        engines(spec, attached=False)
    lines = re.findall(r"KVPrefetchConnector: .*an engine's ranks must be on the node .*", str(caught.value))
    assert lines
    assert all("one daemon" in line and "distributed_executor_backend=mp (give" in line for line in lines)
    assert any("tp_rank=1 is on node" in line for line in lines)
    site.assert_idle()
