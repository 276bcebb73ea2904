"""Arguments that the benchmarks of several connectors share: rounds, variants, LMCache's interpreter, outputs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tests.lab import lmcache
from tests.lab.process import REPO


def parser(module: str, description: str | None, variants: Sequence[str], *, rounds: int) -> argparse.ArgumentParser:
    """`variants`: all that there are, also those that need LMCache."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=description)
    made.add_argument(
        "--rounds", type=int, default=rounds, help="measured rounds after the warm-up (default %(default)s)"
    )
    made.add_argument("--variants", help=f"of {','.join(variants)} (default all that can run)")
    made.add_argument(
        "--lmcache-python",
        type=lambda path: Path(path).absolute(),
        metavar="PYTHON",
        help="an interpreter with LMCache and vLLM, for the variants that need it (docs/BENCHMARKS.md)",
    )
    made.add_argument("--json", type=Path, metavar="OUT", help="write settings and all figures to this file")
    made.add_argument("--work", type=Path, default=REPO / "build", help="where the checkpoint is kept")
    return made


def variants_of(
    made: argparse.ArgumentParser, options: argparse.Namespace, always: Sequence[str], with_lmcache: Sequence[str]
) -> list[str]:
    """Return the variants to run; end the program, with the reason, where the options make no sense."""
    possible = [*always] if options.lmcache_python is None else [*always, *with_lmcache]
    variants = possible if options.variants is None else options.variants.split(",")
    if unknown := [each for each in variants if each not in possible]:
        made.error(f"unknown variants {unknown}: choose from {','.join(possible)}")
    if options.lmcache_python is not None and (why_not := lmcache.missing(options.lmcache_python)):
        made.error(f"--lmcache-python: {why_not}")
    if options.rounds < 1:
        made.error(f"--rounds must be at least 1, not {options.rounds}")
    return variants
