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
FEW = ("Llama 2 and 3", "Qwen3.5 and 3.6", "Gemma 4", "Mistral 7B v0.1")


@pytest.mark.parametrize("names", [FEW, pytest.param(tuple(MODELS), marks=pytest.mark.stress)], ids=["few", "all"])
def test_the_page_of_models_is_that_of_this_vllm(names: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "tests.support.gallery"]
    made = subprocess.run([*command, *names], capture_output=True, text=True, timeout=600, cwd=ROOT, check=True).stdout
    page, said = PAGE.read_text().splitlines(), [line for line in made.splitlines() if line.startswith("|")]
    assert len(said) == 2 + len(names)
    assert [line for line in said if line not in page] == [], f"print the table: {' '.join(command)}"
