"""The page of models says what vLLM and the connector's start checks make of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import vllm

from tests.support.gallery import MODELS
from tests.support.package import ROOT

pytestmark = pytest.mark.skipif(not vllm.__version__.startswith("0.32."), reason="the page is of vLLM 0.32")
PAGE = ROOT / "docs" / "reference" / "models.md"


@pytest.mark.stress
def test_the_page_of_models_is_that_of_this_vllm() -> None:
    """Under `stress`, as vLLM makes the configuration of each: minutes."""
    command = [sys.executable, "-m", "tests.support.gallery"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, check=True).stdout
    page, said = PAGE.read_text().splitlines(), [line for line in made.splitlines() if line.startswith("|")]
    assert len(said) == 2 + len(MODELS)
    assert [line for line in said if line not in page] == [], f"print the table: {' '.join(command)}"
