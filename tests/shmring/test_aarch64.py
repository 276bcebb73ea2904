"""The extension's orders on aarch64: cross-compiled, the code holds the instructions that the C11 orders require."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "shmring" / "_atomics.c"
COMPILER, OBJDUMP = "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-objdump"

pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which(OBJDUMP) is None, reason=f"{COMPILER} is not installed"
)


@pytest.fixture(scope="module", params=["armv8-a", "armv8.1-a", "armv9-a"])
def functions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Function name -> its instructions, `mnemonic operands` each. armv9-a is what Grace is."""
    compiled = tmp_path_factory.mktemp("aarch64") / "orders.o"
    march = f"-march={request.param}"
    # Freestanding: the compiler's own headers are enough, so no C library for aarch64 has to be installed.
    options = ["-std=c11", "-O2", "-ffreestanding", march, "-mno-outline-atomics", "-DSHMRING_ORDERS_ONLY"]
    subprocess.run([COMPILER, *options, "-c", str(SOURCE), "-o", str(compiled)], check=True)
    listing = subprocess.run(
        [OBJDUMP, "-d", "--no-show-raw-insn", str(compiled)], check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, list[str]] = {}
    for name, body in re.findall(r"<order_(\w+)>:\n((?: .*\n)+)", listing):
        found[name] = [" ".join(line.split("\t")[1:]).strip() for line in body.splitlines()]
    return found


def mnemonics(instructions: list[str]) -> list[str]:
    return [instruction.split()[0] for instruction in instructions]


def test_an_acquire_load_is_ldar_or_ldapr(functions: dict[str, list[str]]) -> None:
    """ldapr (armv8.3) orders later accesses as ldar does."""
    loads = [name for name in mnemonics(functions["load_acquire"]) if name.startswith("ld")]
    assert loads in (["ldar"], ["ldapr"])


def test_a_release_store_is_stlr(functions: dict[str, list[str]]) -> None:
    assert [name for name in mnemonics(functions["store_release"]) if name.startswith("st")] == ["stlr"]


def test_an_exchange_acquires_and_releases_in_one(functions: dict[str, list[str]]) -> None:
    names = set(mnemonics(functions["compare_exchange"]))
    assert {"ldaxr", "stlxr"} <= names or "casal" in names
    assert not names & {"ldxr", "stxr", "cas", "casa", "casl"}, "a weaker form of either half"


def test_publish_stores_fences_and_only_then_loads(functions: dict[str, list[str]]) -> None:
    steps = [step for step in functions["publish"] if step.split()[0][:2] in ("ld", "st", "dm")]
    assert [step.split()[0] for step in steps] == ["stlr", "dmb", "ldr"]
    assert steps[1] == "dmb ish"


def test_a_fence_is_a_full_barrier_of_the_inner_shareable_domain(functions: dict[str, list[str]]) -> None:
    assert [step for step in functions["fence"] if step.startswith("dmb")] == ["dmb ish"]


def test_no_order_is_made_by_a_call_out_of_line(functions: dict[str, list[str]]) -> None:
    assert len(functions) == 5
    assert not [step for body in functions.values() for step in body if step.split()[0] in ("bl", "blr")]
