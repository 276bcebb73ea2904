"""The scheduler's contract with a real engine: resets, modes and roles."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Site, hits, served
from tests.lab.engine import Engine
from tests.lab.prompts import make_prompts

PROMPTS = make_prompts(6, 300, seed=41)
HITS = hits(PROMPTS)


@pytest.fixture(scope="module")
def right(plain: Engine) -> list[list[int]]:
    return plain.run(PROMPTS).tokens


@pytest.fixture(scope="module")
def filled(site: Site, right: list[list[int]]) -> Engine:
    """An engine whose prompts are in the store."""
    engine = site.engine()
    assert engine.run(PROMPTS).tokens == right
    site.fresh(engine)
    return engine


@pytest.mark.shows("reset of the connector")
def test_after_a_reset_of_the_connector_nothing_old_is_served(site: Site, right: list[list[int]]) -> None:
    engine = site.engine(extra={"cache_prefix": "reset"})
    other = site.engine(extra={"cache_prefix": "keeps"})
    for each in (engine, other):
        each.run(PROMPTS)
        site.fresh(each)
    assert engine.reset_prefix_cache(reset_connector=True)
    served(engine.run(PROMPTS), right, [0] * len(PROMPTS))
    site.fresh(engine)
    assert engine.run(PROMPTS).cached_tokens == HITS, "what the new weights gave is stored again"
    assert other.run(PROMPTS).cached_tokens == HITS, "another namespace keeps its keys"
    for each in (engine, other):
        each.stop()


@pytest.mark.shows("`mode` shadow")
@pytest.mark.usefixtures("filled")
def test_shadow_looks_up_and_never_loads(site: Site, right: list[list[int]]) -> None:
    shadow = site.engine(extra={"mode": "shadow"})
    served(shadow.run(PROMPTS), right, [0] * len(PROMPTS))
    counters = shadow.call("tests.e2e.probes:counters")
    assert counters["hints"] == len(PROMPTS)
    assert counters.get("loads", 0) == counters.get("saves", 0) == 0
    site.assert_idle()
    shadow.stop()


@pytest.mark.shows("producers and consumers")
def test_producers_never_load_and_consumers_never_save(site: Site, right: list[list[int]]) -> None:
    producer = site.engine(role="kv_producer", extra={"cache_prefix": "roles"})
    consumer = site.engine(role="kv_consumer", extra={"cache_prefix": "roles"})
    assert consumer.run(PROMPTS).cached_tokens == [0] * len(PROMPTS)
    for _ in range(2):
        assert producer.run(PROMPTS).cached_tokens == [0] * len(PROMPTS)
        site.fresh(producer)
    site.fresh(consumer)
    served(consumer.run(PROMPTS), right, HITS)
    assert consumer.call("tests.e2e.probes:counters").get("saves", 0) == 0
    for each in (producer, consumer):
        each.stop()
