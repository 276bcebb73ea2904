"""Measures how far one request walks through the package: calls of Python functions, files, and moves between files.

An engine in this process (scheduler and worker, vLLM on a CPU) and a daemon with its own store count while a byte in
shared memory says so.  Each row is the median of its runs, for a prompt of ten blocks:

* load: its blocks are staged while it waits in the queue; "load now": the scheduler asks for it at once
* save: it is computed and stored, from its look-up's answer on; "long save" has 50 blocks, and no ceiling:
  how many puts they are depends on the machine
* announced: until its blocks are staged
* tick: of an idle daemon with an attached engine

Calls of the daemon's ticks are no part of a request, nor is a look at an empty ring.  The last line names the rows that
are above their ceilings, with status 1.
"""

from __future__ import annotations

import argparse
import dis
import mmap
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

if __name__ == "__main__" or TYPE_CHECKING:  # the daemon does without
    from kvprefetch.client.door import Door
    from tests.lab.checkpoint import make_checkpoint
    from tests.lab.connectors import ours
    from tests.lab.daemon import Daemon
    from tests.lab.engine import EngineSpec

# Calls, files and moves: an eighth above what is reached, as a loaded machine has a few more turns of the loop.
CEILINGS = {
    "load": (506, 71, 325),
    "load now": (610, 72, 395),
    "save": (371, 55, 220),
    "announced": (443, 53, 290),
    "tick": (108, 47, 83),
}
PER_BLOCK = 1
BLOCK, BLOCKS, LONG = 32, 10, 50
REPO = Path(__file__).resolve().parents[1]
PARTS = tuple(f"{REPO}/{part}/" for part in ("connector", "daemon", "kv", "shmring"))
WHERE = "KVPREFETCH_WALK"  # names the folder with the byte and the calls
TICK = "daemon/runtime/housekeeping.py:Housekeeping.tick"


# --- in both processes ------------------------------------------------------------------------------------------------


def install() -> Callable[[FrameType, str, Any], None]:
    """Write down each call from now on, on each thread that starts, while the byte is set; return the profiler."""
    folder = os.environ[WHERE]
    on = mmap.mmap(os.open(f"{folder}/on", os.O_RDONLY), 1, prot=mmap.PROT_READ)
    out = os.open(f"{folder}/calls", os.O_WRONLY | os.O_APPEND)
    names: dict[CodeType, str] = {}
    starts: dict[CodeType, int] = {}

    def named(code: CodeType) -> str:
        if (name := names.get(code)) is None:
            path, name = os.path.realpath(code.co_filename), ""
            if path.startswith(PARTS) and code.co_name[0] != "<":
                name = f"{path[len(str(REPO)) + 1 :]}:{code.co_qualname.replace('<locals>.', '')}"
            names[code] = name
        return name

    def begins(frame: FrameType, code: CodeType) -> bool:
        """Whether a generator is entered for the first time."""
        if code not in starts:
            resumes = [each.offset for each in dis.get_instructions(code) if each.opname == "RESUME" and not each.arg]
            starts[code] = resumes[0]
        return frame.f_lasti <= starts[code]

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if not on[0]:
            return
        name, depth = named(frame.f_code), 0
        if event == "call":
            if not name or (frame.f_code.co_flags & 0x2A0 and not begins(frame, frame.f_code)):
                return
            back = frame.f_back
            while back is not None:
                depth += bool(named(back.f_code))
                back = back.f_back
        elif event == "c_return" and name and getattr(arg, "__name__", "") in ("poll", "select"):
            name = ""  # a wake
        else:
            return
        line = f"{time.monotonic_ns()} {os.getpid()} {threading.get_native_id()} {depth} {name}\n"
        os.write(out, line.encode())

    threading.setprofile(profile)
    return profile


# --- the two processes ------------------------------------------------------------------------------------------------


class Engine:
    """vLLM's engine in this process."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        transfer = KVTransferConfig(**arguments.pop("kv_transfer_config"))
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments, kv_transfer_config=transfer))
        core = self._engine.engine_core.engine_core  # type: ignore[attr-defined]
        self._scheduler, step, self._executed = core.scheduler, core.step_fn, True

        def stepped() -> Any:
            outputs, self._executed = step()
            return outputs, self._executed

        core.step_fn = stepped
        self._count = 0

    def serve(self, prompt: list[int], queued_s: float, then: Callable[[], None] = lambda: None) -> list[str]:
        """Serve one prompt, which waits so long first; return its block hashes. `then` is called after the wait."""
        from vllm import SamplingParams

        self._count += 1
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
        self._engine.add_request(f"walk-{self._count}", {"prompt_token_ids": prompt}, sampling)
        [request] = self._scheduler.requests.values()
        hashes = [bytes(each).hex() for each in request.block_hashes]
        time.sleep(queued_s)
        then()
        self.rest()
        return hashes

    def rest(self) -> None:
        """Step until the scheduler has nothing left, as a served engine does."""
        while self._engine.has_unfinished_requests() or self._scheduler.has_requests():
            self._engine.step()
            if not self._executed:
                time.sleep(0.001)

    def forget(self) -> None:
        while not self._engine.reset_prefix_cache():
            self._engine.step()


# --- what was recorded ------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call, or a wake of a thread, which has no name."""

    ns: int
    pid: int
    thread: int
    depth: int
    name: str

    @property
    def file(self) -> str:
        return self.name.partition(":")[0]


class Walk(NamedTuple):
    """One run, in numbers."""

    calls: int
    files: int
    moves: int
    names: list[str]


def walk(calls: list[Call]) -> Walk:
    """Count the moves between files, each thread for itself."""
    moves, last = 0, dict[int, str]()
    for call in calls:
        moves += last.get(call.thread, call.file) != call.file
        last[call.thread] = call.file
    return Walk(len(calls), len({call.file for call in calls}), moves, [call.name for call in calls])


class Recorder:
    """The byte and the calls."""

    def __init__(self, folder: Path) -> None:
        self._on, self._calls = (folder / "on").open("w+b", buffering=0), folder / "calls"
        self._calls.touch()
        self.stop()

    def start(self) -> None:
        os.truncate(self._calls, 0)
        os.pwrite(self._on.fileno(), b"\1", 0)

    def stop(self) -> None:
        os.pwrite(self._on.fileno(), b"\0", 0)

    def taken(self) -> list[Call]:
        self.stop()
        rows = (line.split(" ", 4) for line in self._calls.read_text().splitlines())
        return sorted(Call(int(ns), int(pid), int(thread), int(depth), name) for ns, pid, thread, depth, name in rows)


def turns(calls: list[Call], daemon: int) -> list[list[Call]]:
    """Cut the calls of the daemon's main loop at each of its wakes; the calls before the first come first."""
    found: list[list[Call]] = [[]]
    for call in calls:
        if call.pid == call.thread == daemon:
            if call.name:
                found[-1].append(call)
            else:
                found.append([])
    return found


def without_ticks(calls: list[Call], daemon: int) -> list[Call]:
    kept, below = list[Call](), -1
    for call in calls:
        if call.pid == call.thread == daemon:
            if call.name and 0 <= below < call.depth:
                continue
            below = call.depth if call.name == TICK else -1
            if below >= 0:
                continue
        kept.append(call)
    return kept


def of_request(calls: list[Call], daemon: int, idle: set[str]) -> Walk:
    """Return the walk without ticks, and without turns in which nothing ran but what an idle daemon runs, too."""
    calls = without_ticks(calls, daemon)
    empty = {id(call) for turn in turns(calls, daemon) if all(each.name in idle for each in turn) for call in turn}
    return walk([call for call in calls if call.name and id(call) not in empty])


# --- the measurement --------------------------------------------------------------------------------------------------


class Bench:
    """An engine, a daemon, and prompts that no run shares."""

    def __init__(self, daemon: Daemon, engine: Engine, recorder: Recorder) -> None:
        self.daemon, self.engine, self.recorder = daemon, engine, recorder
        self._source = random.Random(7)

    def prompts(self, count: int, blocks: int = BLOCKS) -> list[list[int]]:
        return [[self._source.randrange(16, 2048) for _ in range(blocks * BLOCK + 1)] for _ in range(count)]

    def serve(self, prompt: list[int], queued_s: float = 0.0, *, saves: bool = False) -> tuple[list[str], list[Call]]:
        """Serve a prompt; return its hashes and its calls, for one that `saves` those after its wait."""
        lines, stored = (len(self.daemon.records(event)) for event in ("request.done", "save.done"))
        if not saves:
            self.recorder.start()
        hashes = self.engine.serve(prompt, queued_s, self.recorder.start if saves else lambda: None)
        line = self.daemon.wait_record("request.done", count=lines + 1)
        if saves:
            assert self.daemon.wait_record("save.done", count=stored + 1)
        self.engine.rest()
        time.sleep(0.03)
        calls = self.recorder.taken()
        assert line is not None
        assert saves or (line["loaded_blocks"], line["outcome"]) == (BLOCKS, "loaded"), line
        return hashes, calls

    def announce(self, hashes: list[str], name: str) -> list[Call]:
        action = {"action_id": "1", "action_type": "kv.prefetch", "action_version": "1.0"}
        body = {
            "protocol_version": "0.1",
            "message_id": name,
            "actions": [{**action, "payload": {"block_hashes": hashes}}],
        }
        self.recorder.start()
        Door(self.daemon.socket).ask("POST", "/v1/kv_hints", body)
        time.sleep(0.1)
        calls = self.recorder.taken()
        _, answer = Door(self.daemon.socket).ask("GET", f"/v1/kv_hints/{name}?wait_ms=1000")
        assert answer["actions"][0]["outcome"] == "completed", answer
        return calls

    def idle(self) -> list[Call]:
        time.sleep(6.0)  # it ticks less often 5 s after it had something to do
        self.recorder.start()
        time.sleep(3.0)
        return self.recorder.taken()


def measure(bench: Bench, runs: int) -> dict[str, list[Walk]]:
    """Return the walks of each row."""
    idle, pid = bench.idle(), bench.daemon.pid
    warm, loads, now, hashed = (bench.prompts(count) for count in (4, runs, runs, runs))
    profiler = install()
    sys.setprofile(profiler)
    hashes = [bench.serve(each, saves=True)[0] for each in (*hashed, *warm, *loads, *now)]
    bench.engine.forget()
    for prompt in warm:  # what is done once only is no part of a request
        bench.serve(prompt, 0.05)
    found = {
        "load": [bench.serve(each, 0.05)[1] for each in loads],
        "load now": [bench.serve(each)[1] for each in now],
        "save": [bench.serve(each, 0.05, saves=True)[1] for each in bench.prompts(runs)],
        "long save": [bench.serve(each, 0.05, saves=True)[1] for each in bench.prompts(runs, LONG)],
        "announced": [bench.announce(each, f"walk-{at}") for at, each in enumerate(hashes[:runs])],
    }
    sys.setprofile(None)
    names = {call.name for call in idle}
    walks = {row: [of_request(calls, pid, names) for calls in some] for row, some in found.items()}
    # The numbers are published in each other tick.
    return {**walks, "tick": [max(walk(turn) for turn in turns(idle, pid)[1:-1])]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--top", type=int, default=0, help="print so many functions of each row, by calls")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvw-") as name:
        folder = Path(name)
        recorder = Recorder(folder)
        (folder / "sitecustomize.py").write_text(
            "import sys\nfrom benchmarks.walk import install\nsys.setprofile(install())\n"
        )
        os.environ[WHERE] = name
        path = {"PYTHONPATH": f"{folder}:{REPO}"}
        with Daemon(staging="64MiB", memory="256MiB", extra=("--call-timeout-ms", "60000"), env=path) as daemon:
            spec = EngineSpec(make_checkpoint(folder), kv_transfer=ours(daemon.socket))
            os.environ |= {**spec.environment(), "VLLM_LOGGING_LEVEL": "WARNING"}
            engine = Engine(spec.engine_args())
            assert daemon.wait_record("engine.attached", timeout_s=60)
            walks = measure(Bench(daemon, engine, recorder), options.runs)
    over = report({row: sorted(some)[len(some) // 2] for row, some in walks.items()}, options.top)
    print(f"above its ceiling: {', '.join(over)}" if over else "all within their ceilings", flush=True)
    os._exit(bool(over))  # vLLM's threads need not end first


def report(walks: dict[str, Walk], top: int) -> list[str]:
    """Print the table; return what is above its ceiling."""
    over = []
    print(f"{'':12}{'calls':>8}{'files':>8}{'moves':>8}")
    for row, found in walks.items():
        numbers = found[:3]
        print(f"{row:12}" + "".join(f"{number:8}" for number in numbers))
        ceilings = CEILINGS.get(row, numbers)
        if any(number > most for number, most in zip(numbers, ceilings, strict=True)):
            over.append(f"{row} {numbers} > {ceilings}")
    for row, found in walks.items() if top else ():
        print(f"{row}:", *(f"\n  {count:4d}  {name}" for name, count in Counter(found.names).most_common(top)))
    more = Counter(walks["long save"].names)
    more.subtract(walks["save"].names)
    per_block = sum(max(0, count) // (LONG - BLOCKS) for count in more.values())
    print(f"functions that each saved block calls: {per_block}")
    return over + [f"{per_block} calls per saved block > {PER_BLOCK}"] * (per_block > PER_BLOCK)


if __name__ == "__main__":
    main()
