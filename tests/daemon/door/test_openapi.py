"""docs/reference/openapi.json describes the door's routes as the code has them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.openapi import describe

FILE = Path(__file__).parents[3] / "docs/reference/openapi.json"


def test_the_description_is_that_of_the_code() -> None:
    assert json.loads(FILE.read_text()) == describe(), "python -m tests.support.documents openapi > the file"


def test_each_reference_of_it_has_its_schema() -> None:
    text = FILE.read_text()
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= json.loads(text)["components"]["schemas"].keys()
    assert {"Envelope", "Answer", "Prefetch", "Problem"} <= json.loads(text)["components"]["schemas"].keys()
