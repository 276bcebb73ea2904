"""`make fuzz`: each target for some minutes; what it finds goes into the corpus.

    python -m tests.fuzz [TARGET ...] [--minutes 2] [--seed N]

A case that fails is written to tests/fuzz/corpus/TARGET, which the tests replay: mend the product, and commit it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.daemon.runtime.test_soak import held
from tests.fuzz.targets import Answers, Configuration, Control, OfDaemon, OverHttp, Records, Target
from tests.lab.daemon import Daemon

CORPUS = Path(__file__).parent / "corpus"
OF_DAEMON: dict[str, Callable[[Daemon], OfDaemon]] = {"control": Control, "records": Records, "door": OverHttp}
TARGETS = (*OF_DAEMON, "configuration", "answers")


@contextmanager
def opened(name: str) -> Iterator[Target]:
    """A target, and a daemon where it needs one."""
    with contextlib.ExitStack() as stack:
        if name in OF_DAEMON:
            daemon = stack.enter_context(Daemon(memory="32MiB", staging="4MiB"))
            of_daemon = OF_DAEMON[name](daemon)
            stack.callback(of_daemon.close)
            target: Target = of_daemon
        elif name == "configuration":
            target = Configuration(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        else:
            target = Answers()
        yield target


def fuzz(name: str, seconds: float, seed: int, most: int | None = None) -> tuple[int, list[str]]:
    """Try cases for so long, `most` at most; return how many, and what was found: the first line of each."""
    tried, found, source, until_s = 0, list[str](), random.Random(seed), time.monotonic() + seconds
    with opened(name) as target:
        pid = target.daemon.pid if isinstance(target, OfDaemon) else 0
        before = held(pid) if pid else (0, 0, 0)
        while time.monotonic() < until_s and (most is None or tried < most) and len(found) < 5:
            case = target.case(source)
            tried += 1
            try:
                target.attempt(json.loads(json.dumps(case)))
            except Exception:
                text = json.dumps(case)
                file = CORPUS / name / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text + "\n")
                found.append(f"{file.name}: {traceback.format_exc(limit=-3)[:2000]}")
                if pid:
                    break
        if pid and not found:
            after = held(pid)
            if after[0] > 1.1 * before[0] + (32 << 10) or after[1] > before[1] + 64:
                found.append(f"memory (KiB), descriptors, threads grew: {before} {after}")
    return tried, found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--minutes", type=float, default=2.0, help="for each target")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    chosen = parser.parse_args()
    bad = 0
    for name in chosen.targets or TARGETS:
        tried, found = fuzz(name, 60 * chosen.minutes, chosen.seed)
        bad += len(found)
        print(f"{name}: {tried} cases, seed {chosen.seed}: {len(found)} found", *found, sep="\n  ", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
