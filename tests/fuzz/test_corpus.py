"""Every case that a fuzzer found once, and a few new ones of each target."""

from __future__ import annotations

import json

import pytest

from tests.fuzz.__main__ import CORPUS, TARGETS, fuzz, opened

pytestmark = pytest.mark.store


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_found_once_stays_mended(name: str) -> None:
    """The corpus has what was found, and a good case of each kind."""
    cases = sorted((CORPUS / name).glob("*.json"))
    assert cases, "each target has a corpus"
    with opened(name) as target:
        for file in cases:
            target.attempt(json.loads(file.read_text()))


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_new_cases_find_nothing(name: str) -> None:
    tried, found = fuzz(name, seconds=20, seed=1, most=60)
    assert found == []
    assert tried > 0
