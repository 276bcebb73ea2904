"""What changes a rank's weights in place, and in which step: seen where vLLM's worker and model are asked to do it.

A reset does not say when the weights change: vLLM resets first (`/pause`), updates then, and computes only behind both
(`/resume`).  So a rank takes the digest in the first step of a reset that computes anything.  Whatever updates the
weights behind that step makes the digest void, and with it the KV that was computed since the reset.
"""

from __future__ import annotations

import functools
import inspect
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from ..words.metadata import OfReset, RankWeights
from . import built
from .weights import NotComparable, digest

# Of what a worker and its runner have: these names, and each with "weight" in it, also of a `worker_extension_cls`, but
# those that begin like one that leaves the weights as they are.
_ALSO, _READS = {"load_model"}, ("check", "compute", "get", "init", "is", "shutdown", "supports")

log = logging.getLogger("vllm.kvprefetch.worker")

calls = 0  # begins and ends of updates in this process, which may be the scheduler side's, too


def of_worker(worker: Any, *, eplb: bool) -> Updates:
    """Watch a worker of vLLM, None where it was not found. `eplb`: its experts change places by themselves."""
    if worker is None:
        return Updates(unknown="vLLM's worker was not found")
    try:
        runner, models = worker.model_runner, built.models(worker)
    except Exception as error:  # of a kind of worker that is not known
        return Updates(unknown=f"{type(worker).__name__} shows no model: {error}")
    found = Updates(functools.partial(built.models, worker), "enable_eplb moves the experts" if eplb else "")
    for holder in (worker, runner):
        found.watch(holder, [name for name in dir(type(holder)) if _updates(name)])
    for model in models:
        found.watch(model, ["load_weights"])
    return found


def _updates(name: str) -> bool:
    """Whether a method of this name may change weights in place."""
    return name in _ALSO or ("weight" in name and not name.startswith(("_", *_READS)))


class Updates:
    """One rank's weights. `models` returns its models; with `unknown` they are never compared, for that reason.

    `updates` counts begins and ends of updates.  `report` is what to tell the scheduler side with this step.
    """

    def __init__(self, models: Callable[[], Sequence[Any]] = list, unknown: str = "") -> None:
        self.updates = 0
        self.report: RankWeights | None = None
        self._models, self._unknown = models, unknown
        self._updating = 0
        # The reset that steps name, and the updates before its first step; None before that.
        self._reset, self._digested = 0, False
        self._first: int | None = None
        # The last digest, and the updates before it.
        self._last, self._last_at = b"", 0
        self._logged = False

    def watch(self, holder: Any, names: Sequence[str]) -> None:
        """From now on, count the calls of these methods of an object, as far as they are methods."""
        for name in names:
            if inspect.isfunction(inspect.unwrap(getattr(type(holder), name))):
                setattr(holder, name, self._counting(getattr(holder, name)))

    def _counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            if not self._last:  # to be compared with the digest after it
                self._last = self._digest()
            self._counts()
            self._updating += 1
            try:
                return method(*args, **options)
            finally:
                self._updating -= 1
                self._counts()

        return call

    def _counts(self) -> None:
        global calls
        self.updates, calls = self.updates + 1, calls + 1

    def step_begins(self, step: OfReset, *, loads: bool) -> None:
        """A step begins; `loads`: it fills blocks with stored KV."""
        if step.number < self._reset:
            return
        if step.number > self._reset:
            self._reset, self._first, self._digested = step.number, None, False
        if self._first is None:
            if step.computes or loads:
                self._first = self.updates
                if step.number or self.updates:
                    self._take_digest()
        elif self._first != self.updates:
            self.report = RankWeights(self._reset)

    def hold(self, step: OfReset) -> bool:
        """Whether the weights are those that the step's loads and saves are of."""
        unchanged = self.updates == (self._first or 0) and not self._updating
        return unchanged and step.number == self._reset and step.agreed == self._digested

    def _take_digest(self) -> None:
        before = self._last if self._last_at != self.updates else b""
        self._last_at, self._last, self._digested = self.updates, self._digest(), True
        self.report = RankWeights(self._reset, self._last, before)

    def _digest(self) -> bytes:
        """The digest of the weights; where there is none, one that they never have again."""
        why = self._unknown
        try:
            if not why:
                found: bytes = digest(self._models())
                return found
        except NotComparable as error:
            why = str(error)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        if not self._logged:
            self._logged = True
            log.warning(
                "kvprefetch: this rank's weights cannot be compared: %s. After a reset or an update of its weights no "
                "other engine finds the KV that this one stores, nor does this one after the next",
                " ".join(why.split())[:400],
            )
        return uuid.uuid4().bytes
