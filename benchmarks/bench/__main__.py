"""Runs pieces of the benchmark and writes one JSON for each: `python -m benchmarks.bench [PIECE ...]`."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.bench import pieces, variants
from benchmarks.bench.lab import Lab
from benchmarks.bench.pieces import Piece
from benchmarks.bench.runner import Runner
from benchmarks.bench.setting import BLOCK, MODEL
from benchmarks.machine import command, machine
from tests.lab import link, lmcache
from tests.lab.process import REPO, exit_on_sigterm

FORMAT = 1
# One core for an engine, and no thread of it that spins for the next piece of work.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "KMP_BLOCKTIME": "0", "VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
WORK = REPO / "build" / "bench"
PUBLISHED = REPO / "docs" / "benchmarks"


def arguments(module: str, table: Mapping[str, Piece]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description="Run pieces of the benchmark and write one JSON for each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["pieces:", *(f"  {each.name:11}{each.question}" for each in table.values())]),
    )
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help="see below (default all)")
    parser.add_argument(
        "--variants", help=f"of {','.join(variants.ALL)}; all: all that can run (default: each piece's own)"
    )
    parser.add_argument("--points", type=float, nargs="+", default=(), help="on the axis (default: each piece's own)")
    parser.add_argument("--requests", type=int, help="of each pass (default: each piece's own)")
    parser.add_argument("--rounds", type=int, help="measured rounds (default: each piece's own)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="of each piece: rounds that do not fit are dropped (default %(default)g)",
    )
    parser.add_argument("--quick", action="store_true", help="few points, half of the requests, one round")
    parser.add_argument("--publish", action="store_true", help=f"also write to {PUBLISHED.relative_to(REPO)}/DATE")
    parser.add_argument("--disk", action="store_true", help="the store is a slow disk, as it is without root")
    parser.add_argument(
        "--lmcache-python",
        type=lambda path: Path(path).absolute(),
        metavar="PYTHON",
        help="an interpreter with LMCache and vLLM, for the variants that need it (docs/BENCHMARKS.md)",
    )
    parser.add_argument("--out", type=Path, default=WORK, help="folder of the JSONs (default build/bench)")
    return parser


def chosen_variants(given: str | None, piece: Piece) -> list[str]:
    """Raises ValueError for a variant that is none."""
    if given is None:
        return list(piece.variants)
    names = list(variants.ALL) if given == "all" else given.split(",")
    if unknown := [each for each in names if each not in variants.ALL]:
        raise ValueError(f"no such variant: {', '.join(unknown)}: choose from {','.join(variants.ALL)}")
    return names


def write(result: dict[str, Any], folder: Path) -> Path:
    """Write a piece's result; whoever reads the file meanwhile finds the old one or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['piece']}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    partial.replace(path)
    return path


def measure(piece: Piece, options: argparse.Namespace, said: str, lab: type[Lab]) -> dict[str, Any]:
    """Run one piece and write its result; what was measured before a failure or SIGTERM is in it, with the reason."""
    begun = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begun:6.1f} s] {piece.name}: {line}", flush=True)

    say(piece.question)
    points = piece.settings(quick=options.quick, requests=options.requests, points=options.points)
    if options.disk:
        points = [(at, setting.but(far="disk")) for at, setting in points]
    rounds = options.rounds or (1 if options.quick else piece.rounds)
    runner = Runner(points, chosen_variants(options.variants, piece), rounds, 60 * options.minutes, say)
    result: dict[str, Any] = {
        "format": FORMAT,
        "piece": piece.name,
        "question": piece.question,
        "axis": piece.axis,
        "logarithmic": piece.logarithmic,
        "quick": options.quick,
        "command": said,
        "begun": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "environment": ENVIRONMENT,
        "block_bytes": BLOCK * MODEL.kv_bytes_per_token,
        "failed": "it was ended",
    }
    try:
        runner.run(lambda some, runs: lab(some, runs, say, options.lmcache_python), options.lmcache_python)
        result["failed"] = None
    except Exception as error:
        traceback.print_exc()
        result["failed"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finally:
        result |= {"seconds": round(time.monotonic() - begun, 1), "load_at_end": round(os.getloadavg()[0], 2)}
        result |= runner.result
        say(f"written: {write(result, options.out)}")
    return result


def main(
    argv: list[str] | None = None,
    *,
    module: str = "benchmarks.bench",
    table: Mapping[str, Piece] = pieces.PIECES,
    lab: type[Lab] = Lab,
) -> int:
    parser = arguments(module, table)
    options = parser.parse_args(argv)
    try:
        some = pieces.chosen(options.pieces, table)
        for piece in some:
            chosen_variants(options.variants, piece)
    except ValueError as error:
        parser.error(str(error))
    for name in ("rounds", "requests"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name} must be at least 1, not {value}")
    if options.quick and options.publish:
        parser.error("--publish is for whole runs: leave --quick away")
    if options.lmcache_python is not None and (why_not := lmcache.missing(options.lmcache_python)):
        parser.error(f"--lmcache-python: {why_not}")
    exit_on_sigterm()
    os.environ.update(ENVIRONMENT)
    if not options.disk and (why_not := link.available()) is not None:
        print(f"no limited link here ({why_not}): the store is a slow disk, which only kvprefetch can read", flush=True)
        options.disk = True
    said = command(module, sys.argv[1:] if argv is None else argv)
    bad = []
    for piece in some:
        result = measure(piece, options, said, lab)
        if result["failed"] or result["tokens"]["different"]:
            bad.append(f"{piece.name}: {result['failed'] or 'other tokens'}")
        elif options.publish:
            print(f"{piece.name}: {write(result, PUBLISHED / result['begun'][:10])}", flush=True)
    for line in bad:
        print(f"FAILED, not published: {line}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
