"""The pieces of `make bench-served`: machines by load, links by the length of a step, arrivals and hits. Pure."""

from __future__ import annotations

from benchmarks.bench.pieces import Piece
from benchmarks.bench.setting import MODEL, Setting
from benchmarks.bench.variants import LOCAL, ON_DEMAND, OURS, RECOMPUTED
from tests.lab.bed.timeline import GRID, MACHINES, PRESETS, Preset

VARIANTS = (LOCAL, RECOMPUTED, "upstream-async", ON_DEMAND, OURS)
LOADS = "rate of arrivals / capacity with all KV local"
EMPTY = 0.3  # of capacity: hardly a request waits for a place
REQUESTS, PROMPT_TOKENS, PLACES = 400, 2000, 16
# Output tokens by the length of a step: a request runs for about a second.
OUTPUTS = {50.0: (16, 32), 25.0: (24, 56)}
WORDS = {
    "8b-h100": "An 8B model on an H100",
    "70b-tp8": "A 70B model on eight H100",
    "30b-a3b": "A model of 30B with 3B active on an H100",
}


def small(preset: Preset) -> Preset:
    """The preset with a token's KV as small as the bed's; fetch, prefill and step stay as they are."""
    return preset.sized(MODEL.kv_bytes_per_token)


def base(preset: Preset) -> Setting:
    return Setting(
        level=EMPTY,
        requests=REQUESTS,
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUTS.get(preset.base_ms, (60, 100)),
        places=PLACES,
        spare=8,
        link_mbit=1000 * small(preset).link_gbit,
        preset=preset.name,
    )


def fetching(setting: Setting, steps: float) -> Setting:
    """With a link over which a prompt's KV takes so many steps' time."""
    preset = small(PRESETS[setting.preset])
    return setting.but(link_mbit=1000 * preset.fetching(setting.hit_tokens, steps * preset.base_ms).link_gbit)


def _piece(name: str, question: str, axis: str, points: tuple[float, ...], vary: object, at: Setting) -> Piece:
    quick = (points[0], points[-1])
    return Piece(name, question, axis, points, quick, vary, at, VARIANTS, rounds=2, quick_share=8)  # type: ignore[arg-type]


def _words(preset: Preset) -> str:
    return WORDS.get(preset.name, f"steps of {preset.base_ms:g} ms and {preset.prefill_us:g} µs a prompt's token")


PIECES = {
    piece.name: piece
    for piece in (
        *(
            _piece(
                preset.name,
                f"{_words(preset)}: what does prefetch bring at which load?",
                LOADS,
                (EMPTY, 0.5, 0.9),
                lambda base, at: base.but(level=at),
                base(preset),
            )
            for preset in MACHINES
        ),
        *(
            _piece(
                f"load-{preset.name}",
                f"{_words(preset)}: what does prefetch bring at which load?",
                LOADS,
                (EMPTY, 0.5, 0.9),
                lambda base, at: fetching(base, 0.5).but(level=at),
                base(preset),
            )
            for preset in GRID
        ),
        *(
            _piece(
                f"fetch-{preset.name}",
                f"{_words(preset)}: how far may the store be where hardly a request waits?",
                "time to fetch a prompt's KV / step",
                (0.5, 1, 2, 4),
                fetching,
                base(preset),
            )
            for preset in GRID
        ),
        _piece(
            "http",
            "steps of 25 ms and 35 µs a prompt's token, through vllm serve: what do other requests notice?",
            LOADS,
            (EMPTY, 0.5),
            lambda base, at: fetching(base, 0.5).but(level=at),
            base(PRESETS["25-35"]).but(through="http"),
        ),
        _piece(
            "users",
            "What does prefetch bring with how many users?",
            "users of a closed loop",
            (16, 64),
            lambda base, at: fetching(base.but(arrivals="closed", level=at), 0.5),
            base(PRESETS["25-35"]),
        ),
        _piece(
            "burst",
            "What does prefetch bring when requests come at once?",
            "requests in a burst",
            (8, 32),
            lambda base, at: fetching(base.but(arrivals="burst", level=at), 0.5),
            base(PRESETS["25-35"]),
        ),
        _piece(
            "output",
            "Does the length of answers matter?",
            "output tokens, mean",
            (8, 128),
            lambda base, at: fetching(base.but(output_tokens=(round(0.75 * at), round(1.25 * at))), 0.5),
            base(PRESETS["25-35"]),
        ),
        _piece(
            "part",
            "What if the store has only a part of each prompt?",
            "share of the prompt that the store has",
            (0.5, 0.9),
            lambda base, at: fetching(base.but(hit=at), 0.5),
            base(PRESETS["25-35"]),
        ),
        _piece(
            "common",
            "What if eight requests have a first part in common, which most find in the engine's own cache?",
            "share of the prompt that is common",
            (0.5, 0.9),
            lambda base, at: fetching(base.but(shared=at), 0.5),
            base(PRESETS["25-35"]),
        ),
    )
}
