"""Recorded traces, scaled: equal numbers stand for equal parts of prompts. Pure but for reading the files."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.lab.process import REPO

SHARED = REPO.parent / "shared" / "data"
TRACES = {  # where the trace lies under --data, tokens of a hash, and k
    "conversation": (Path("mooncake/conversation_trace.jsonl"), 512, 16),
    "agents": (Path("agents"), 64, 64),
}
QUESTIONS = {  # of the results by trace; of agents that name their sessions, too
    "conversation": "What does prefetch bring in Mooncake's conversations, through the HTTP server?",
    "agents": "What does prefetch bring in sessions of coding agents, through the HTTP server?",
    "sessions": "What does it bring if agents name their sessions, through the HTTP server?",
}
SESSION_HASHES = 1 << 24  # numbers of an agent's session mean something in it alone
TICK_S = 3.0  # Mooncake's recorder knew times to this
LONGEST_PAUSE_S = 60.0  # between two calls of a session; longer ones are cut to this


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `hashes`: a number for each `chunk` tokens of its prompt, the last one for what is left."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hashes: tuple[int, ...]

    @property
    def session(self) -> int:
        """The number of an agent's session."""
        return self.hashes[0] // SESSION_HASHES


@dataclass(frozen=True, slots=True)
class Slice:
    """Requests in order of arrival, the first at 0 s, and the prompts' parts that an endless cache would have.

    `chunk`: tokens of a hash.  `known`: the leading hashes of each request that the trace had before it.  `before`:
    those that it had before the slice began.  `dropped`: requests left out since they are too long.
    """

    chunk: int
    calls: list[Call]
    known: list[tuple[int, ...]]
    before: list[tuple[int, ...]]
    dropped: int

    @property
    def span_s(self) -> float:
        return self.calls[-1].at_s

    @property
    def hit_share(self) -> float:
        """The share of all prompts' tokens that an endless cache would have."""
        return sum(map(len, self.known)) * self.chunk / sum(call.input_tokens for call in self.calls)

    def stored(self, *, before: bool = False) -> list[tuple[int, ...]]:
        """The prefixes that the store must hold, or those of `before`; none is the start of another."""
        every = sorted(set(filter(None, self.before if before else self.known)))
        return [each for each, after in zip(every, [*every[1:], ()], strict=True) if after[: len(each)] != each]

    def stored_blocks(self, block_tokens: int, *, before: bool = False) -> int:
        """Count the different blocks of `block_tokens` in these prefixes."""
        blocks = set()
        for prefix in self.stored(before=before):
            for number in range(1, len(prefix) * self.chunk // block_tokens + 1):
                blocks.add((number, prefix[: -(-number * block_tokens // self.chunk)]))
        return len(blocks)


def conversation(path: Path) -> list[Call]:
    """Mooncake's trace (FAST25-release/traces): one JSON object a line, a hash for each 512 tokens, times in ms."""
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [
        Call(each["timestamp"] / 1000, each["input_length"], each["output_length"], tuple(each["hash_ids"]))
        for each in lines
    ]


def spread(calls: Iterable[Call]) -> list[Call]:
    """Spread the calls of each tick evenly over it: sent at once, their order would be another in every pass."""
    ticks: dict[int, list[Call]] = {}
    for call in calls:
        ticks.setdefault(round(call.at_s / TICK_S), []).append(call)
    return [
        replace(call, at_s=TICK_S * (tick + at / len(some)))
        for tick, some in sorted(ticks.items())
        for at, call in enumerate(some)
    ]


def agents(folder: Path, within_s: float | None = None, seed: int = 0) -> list[Call]:
    """Sessions of kv-cache-tester (`traces/`): a hash for each 64 tokens, times in s since the session began.

    The sessions begin at random within `within_s`, by default the time that the longest one takes. A call does not wait
    for the session's last one.
    """
    calls, source = list[Call](), random.Random(seed)
    sessions = [json.loads(path.read_text())["requests"] for path in sorted(folder.glob("trace_*.json"))]
    lasts = [_times(session) for session in sessions]
    latest = within_s or max((times[-1] for times in lasts), default=0.0)
    for number, (session, times) in enumerate(zip(sessions, lasts, strict=True)):
        begin = source.uniform(0, latest)
        for each, at_s in zip(session, times, strict=True):
            hashes = tuple(SESSION_HASHES * number + value for value in each["hash_ids"])
            calls.append(Call(begin + at_s, each["in"], max(1, each["out"]), hashes))
    return sorted(calls, key=lambda call: call.at_s)


def _times(session: Sequence[dict[str, float]]) -> list[float]:
    """The calls' times in s, without long pauses."""
    times, now, last = list[float](), 0.0, session[0]["t"]
    for each in session:
        now, last = now + min(LONGEST_PAUSE_S, max(0.0, each["t"] - last)), each["t"]
        times.append(now)
    return times


def scaled(calls: Iterable[Call], *, k: int, tokens_per_hash: int, start_s: float, count: int, longest: int) -> Slice:
    """Take `count` requests from `start_s` on, with 1/k of all tokens; drop those of more than `longest` then.

    Raises ValueError where k is no divisor of a hash's tokens, or the trace has no such request.
    """
    if tokens_per_hash % k:
        raise ValueError(f"k must divide the {tokens_per_hash} tokens of a hash: k={k}")
    chunk, seen, dropped = tokens_per_hash // k, set[int](), 0
    taken, known, before = list[Call](), list[tuple[int, ...]](), list[tuple[int, ...]]()
    earlier: frozenset[int] | None = None
    for call in calls:
        if len(taken) == count:
            break
        tokens, output = max(2, call.input_tokens // k), max(2, call.output_tokens // k)
        full = call.hashes[: min(len(call.hashes), tokens // chunk)]
        if call.at_s >= start_s:
            if tokens + output > longest:
                dropped += 1
                continue
            earlier = frozenset(seen) if earlier is None else earlier
            for found, had in ((known, seen), (before, earlier)):
                found.append(full[: next((at for at, each in enumerate(full) if each not in had), len(full))])
            taken.append(Call(call.at_s, min(tokens, len(call.hashes) * chunk), output, call.hashes))
        seen.update(full)
    if not taken:
        raise ValueError(f"no request from {start_s:g} s on is as short as {longest} tokens with k={k}")
    first = taken[0].at_s
    calls = [Call(each.at_s - first, each.input_tokens, each.output_tokens, each.hashes) for each in taken]
    return Slice(chunk, calls, known, before, dropped)


def write_timed(calls: Iterable[Call], path: Path) -> Path:
    """Write them as `vllm bench serve --dataset-name timed_trace` reads them, times in s."""
    lines = (
        json.dumps(
            {
                "timestamp": each.at_s,
                "input_length": each.input_tokens,
                "output_length": each.output_tokens,
                "hash_ids": each.hashes,
            }
        )
        for each in calls
    )
    path.write_text("\n".join(lines) + "\n")
    return path
