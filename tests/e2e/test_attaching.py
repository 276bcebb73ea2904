"""Every start of a served engine (`AsyncLLM`, with the engine core in a process of its own) attaches."""

from __future__ import annotations

import pytest

from tests.lab.bed import engine as bed
from tests.lab.connectors import ours
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine
from tests.lab.template import Template
from tests.support.waiting import eventually


def attached_starts(template: Template, starts: int) -> None:
    """Start so many engines, one after the other; each must be attached although its worker reads long."""
    with Daemon(memory="64MiB", staging="16MiB") as daemon:
        connector = {**ours(daemon.socket), "kv_connector_module_path": "tests.e2e.slow_connector"}
        spec = bed.spec(connector=connector, num_gpu_blocks=64, max_model_len=512, child="tests.lab.bed.served")
        for number in range(1, starts + 1):
            with Engine(spec, template=template) as engine:
                engine.run([[*range(9, 80)]], max_tokens=1)
                what = f"start {number} of {starts}, attached"
                eventually(lambda: len(daemon.records("engine.attached")) == number, 10, what)  # noqa: B023
        assert daemon.records("engine.incomplete") == []


def test_a_served_engine_attaches_although_its_worker_reads_longer_than_it_warms_up(template: Template) -> None:
    attached_starts(template, starts=2)


@pytest.mark.stress
def test_two_hundred_starts_are_two_hundred_attached_engines(template: Template) -> None:
    attached_starts(template, starts=200)
