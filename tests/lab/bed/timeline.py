"""The device's time, modelled: how long steps take, when they begin, when copies end. Pure; the clock is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

_BY_ARITHMETIC = (
    "arithmetic, not measured: a step reads the weights once (HBM: 3.35 TB/s) and has its launches, a prompt's token "
    "takes 2 FLOP a parameter at some 45 % of 989 TFLOP/s, an output token reads the KV of 2,000 tokens; "
)


@dataclass(frozen=True, slots=True)
class Preset:
    """A machine and a model: times of a step, and the bytes that a link and a copy have to move. `source`: whence."""

    name: str
    base_ms: float
    """A step, whatever is in it."""
    prefill_us: float
    """More for each token of a prompt that the step computes."""
    decode_us: float
    """More for each output token."""
    kv_bytes_per_token: int
    link_gbit: float
    """Between the store and the engine's node."""
    copy_gbs: float
    """Between staging and KV cache, GB/s."""
    source: str
    ranks: int = 1
    """Tensor parallel: each has so small a part of a token's KV, and copies it beside the others."""

    def step_ns(self, prefill_tokens: int, decode_tokens: int) -> int:
        return round(1e6 * self.base_ms + 1e3 * (self.prefill_us * prefill_tokens + self.decode_us * decode_tokens))

    def copy_ns(self, copy_bytes: int) -> int:
        return round(copy_bytes / self.copy_gbs)

    def fetch_ms(self, tokens: int) -> float:
        """To bring so many tokens' KV over the link."""
        return 8e-6 * tokens * self.kv_bytes_per_token / self.link_gbit

    def prefill_ms(self, tokens: int) -> float:
        """By how much the computation of so many tokens lengthens a step."""
        return 1e-3 * self.prefill_us * tokens

    def sized(self, kv_bytes_per_token: int) -> Preset:
        """The same proportions with another size of a token's KV: link and copies are scaled alike."""
        share = kv_bytes_per_token / self.kv_bytes_per_token
        return replace(
            self,
            kv_bytes_per_token=kv_bytes_per_token,
            link_gbit=share * self.link_gbit,
            copy_gbs=share * self.copy_gbs,
        )

    def fetching(self, tokens: int, fetch_ms: float) -> Preset:
        """With a link over which so many tokens' KV takes `fetch_ms`."""
        return replace(self, link_gbit=self.link_gbit * self.fetch_ms(tokens) / fetch_ms)

    def proportions(self, tokens: int) -> str:
        """Fetch, prefill and step of a prompt of so many tokens, as results show them."""
        times = self.fetch_ms(tokens), self.prefill_ms(tokens), self.base_ms
        return f"fetch : prefill : step = {' : '.join(f'{each:.3g}' for each in times)} ms"


def _grid(base_ms: float, prefill_us: float) -> Preset:
    source = "no machine: a corner of what deployments have; KV, link and copies of 8b-h100"
    return Preset(f"{base_ms:g}-{prefill_us:g}", base_ms, prefill_us, 0.0, 128 << 10, 100.0, 50.0, source)


GRID = (_grid(10, 35), _grid(25, 35), _grid(50, 10))
MACHINES = (
    Preset(
        "8b-h100",
        base_ms=10.0,
        prefill_us=35.0,
        decode_us=80.0,
        kv_bytes_per_token=128 << 10,
        link_gbit=100.0,
        copy_gbs=50.0,
        source=_BY_ARITHMETIC
        + "Llama 3.1 8B in bfloat16 on an H100: 32 layers, 8 KV heads of 128; one NIC of 100 Gbit/s; copies as "
        "`make bench-cuda` measured them (51 of 55 GB/s)",
    ),
    Preset(
        "70b-tp8",
        base_ms=15.0,
        prefill_us=45.0,
        decode_us=25.0,
        kv_bytes_per_token=320 << 10,
        link_gbit=400.0,
        copy_gbs=400.0,
        source=_BY_ARITHMETIC
        + "Llama 3.1 70B in bfloat16 on eight H100: 80 layers, 8 KV heads of 128; 160 all-reduces a step; 400 Gbit/s "
        "and eight copies beside each other",
        ranks=8,
    ),
    Preset(
        "30b-a3b",
        base_ms=12.0,
        prefill_us=20.0,
        decode_us=60.0,
        kv_bytes_per_token=96 << 10,
        link_gbit=100.0,
        copy_gbs=50.0,
        source=_BY_ARITHMETIC
        + "Qwen3 30B-A3B in bfloat16 on an H100: 48 layers, 4 KV heads of 128, 3.3 of 30 billion parameters a token, "
        "of the experts those that a small batch needs, at a third of a dense model's share of the peak",
    ),
)
PRESETS = {each.name: each for each in (*MACHINES, *GRID)}


class Timeline:
    """One device. `clock` gives now in ns; whoever uses it sleeps until the ends that it returns.

    A step begins when it is launched or when the one before it ends, whichever is later.
    """

    def __init__(self, preset: Preset, clock: Callable[[], int]) -> None:
        self._preset, self._clock = preset, clock
        self._free_ns = self._copies_free_ns = 0
        self.restart()

    def restart(self, preset: Preset | None = None) -> None:
        """Count from zero, and go on with another preset if one is given."""
        self._preset = preset or self._preset
        self.steps = 0
        self.late_launches = 0
        """Steps for which the device waited although their requests were in the step before."""
        self.idle_ns = 0
        """How long it waited for these."""
        self._begun_ns: list[int] = []
        self._admitted: dict[str, int] = {}
        self.copy_ns = 0
        """Of synchronous copies, which lengthen their steps."""
        self.beside_ns = 0
        """Of those on a stream of their own, beside the steps."""

    def launch(
        self,
        prefill_tokens: int,
        decode_tokens: int,
        copy_bytes: int = 0,
        *,
        goes_on: bool = False,
        beside_ns: int = 0,
    ) -> int:
        """Launch a step; return when it ends. `copy_bytes` are copied before it, on the same stream.

        `beside_ns`: they are copied on a stream of their own, from then on, and the step waits for them.

        `goes_on`: requests of the step before are in it, so the device should not have had to wait. An output token
        says as much.
        """
        now_ns = self._clock()
        if self.steps and (goes_on or decode_tokens) and now_ns > self._free_ns:
            self.late_launches += 1
            self.idle_ns += now_ns - self._free_ns
        copied_ns = self._preset.copy_ns(copy_bytes)
        if beside_ns and copy_bytes:
            copied_ns = max(0, self.copy(copy_bytes, beside_ns) - max(now_ns, self._free_ns))
        self.steps += 1
        self.copy_ns += copied_ns
        step_ns = self._preset.step_ns(prefill_tokens, decode_tokens)
        self._begun_ns.append(max(now_ns, self._free_ns))
        self._free_ns = self._begun_ns[-1] + copied_ns + step_ns
        return self._free_ns

    def busy_until(self, ends_ns: int) -> None:
        """Let the step that was launched last end later: it waits for other devices."""
        self._free_ns = max(self._free_ns, ends_ns)

    def admit(self, name: str) -> None:
        """Note that a request's first step is launched next."""
        self._admitted[name] = self.steps

    def report(self) -> dict[str, Any]:
        """All that was counted; when each step began; and by request the number of its first step."""
        counted = {name: getattr(self, name) for name in ("steps", "late_launches", "idle_ns", "copy_ns", "beside_ns")}
        return {**counted, "begun_ns": list(self._begun_ns), "admitted": dict(self._admitted)}

    def copy(self, copy_bytes: int, begun_ns: int = 0) -> int:
        """Begin an asynchronous copy, beside the steps; return when it ends. Copies wait for each other.

        `begun_ns`: it was begun then, as a stream's copy is while the CPU still works on the step.
        """
        copied_ns = self._preset.copy_ns(copy_bytes)
        self.beside_ns += copied_ns
        self._copies_free_ns = max(begun_ns or self._clock(), self._copies_free_ns) + copied_ns
        return self._copies_free_ns
