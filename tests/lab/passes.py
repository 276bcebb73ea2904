"""What one pass of requests through an engine gave, and the figures made from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort request ``index`` of a pass so many steps after it was added."""

    index: int
    after_steps: int


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request; times are seconds since the pass began."""

    index: int
    request_id: str
    tokens: list[int]
    cached_tokens: int
    """Prompt tokens that were not computed: found in the engine's own cache or loaded by a connector."""
    arrival_s: float
    first_token_s: float | None
    finished_s: float | None
    finish_reason: str | None
    token_s: tuple[float, ...] = ()
    """When the client saw tokens; of served engines."""

    @property
    def ttft_s(self) -> float:
        """From being added to its first token; fails for a request that never had one."""
        if self.first_token_s is None:
            raise ValueError(f"request {self.index} has no first token (finish_reason={self.finish_reason})")
        return self.first_token_s - self.arrival_s


def percentile(values: list[float], fraction: float) -> float:
    """The value at ``fraction`` of the sorted values, interpolated; the median at 0.5."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Pass:
    """A finished pass, requests in the order of their prompts."""

    requests: list[RequestResult]
    total_s: float
    steps: int
    begun_s: float = 0.0
    """When it began on the machine's monotonic clock; of served engines."""

    @property
    def tokens(self) -> list[list[int]]:
        """Output tokens of each request."""
        return [each.tokens for each in self.requests]

    @property
    def cached_tokens(self) -> list[int]:
        """Prompt tokens of each request that were not computed."""
        return [each.cached_tokens for each in self.requests]

    def ttft_s(self, fraction: float) -> float:
        """A percentile of the time to first token."""
        return percentile([each.ttft_s for each in self.requests], fraction)
