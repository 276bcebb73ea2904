"""The hints that a request brings with it: whether, how urgently and how much of its KV to fetch; its session. Pure.

A router puts vLLM's envelope of KV hints (vllm/v1/kv_hints/protocol.py) into `Request.kv_hints`, or as `kv_hints` or
`kv_hint` into `kv_transfer_params`.  The action `kv.prefetch` of version 1.0 is known; other actions, versions and
fields are ignored.  The cap of vLLM's OffloadingConnector counts too: `max_load_tokens` in `kv_transfer_params`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ...shmring.wire.checks import ACTION, ACTION_VERSION, ENVELOPE_VERSION, MAX_SESSION_ID, PRIORITIES, shown

MAX_ACTIONS = 16  # of an envelope: the engine's thread reads no more
NO_CAP = (1 << 63) - 1
# The fields that are known, each with its type and its bounds.
_FIELDS: Mapping[str, tuple[type[Any], int, int]] = {
    "fetch": (bool, 0, 1),
    "priority": (int, PRIORITIES[0], PRIORITIES[-1]),
    "max_load_tokens": (int, 0, NO_CAP),
    "session_id": (str, 1, MAX_SESSION_ID),  # its length
}
_WANTED: Mapping[type[Any], str] = {
    bool: "true or false",
    int: "an integer from {} to {}",
    str: "a text of {} to {} characters",
}


class RequestHints(NamedTuple):
    """`priority`: of the fetch, in place of the request's own. `bad`: by field, why a value is ignored, in one line.

    At most `max_load_tokens` are loaded in addition to those in the engine's own cache.  `session_id`: for a request
    without one of its own.
    """

    fetch: bool = True
    priority: int | None = None
    max_load_tokens: int = NO_CAP
    session_id: str = ""
    bad: Mapping[str, str] = MappingProxyType({})


NO_HINTS = RequestHints()


def parse(kv_hints: Any, kv_transfer_params: Any) -> RequestHints:
    """Read these two attributes of a vLLM request; of several values of a field the last one counts."""
    if kv_hints is None and not kv_transfer_params:
        return NO_HINTS
    params = kv_transfer_params if isinstance(kv_transfer_params, Mapping) else {}
    found: dict[str, Any] = {}
    bad: dict[str, str] = {}
    _read({name: params.get(name) for name in ("max_load_tokens", "session_id")}, found, bad)
    given = ("kv_hint", params.get("kv_hint")), ("kv_hints", params.get("kv_hints")), ("kv_hints", kv_hints)
    for name, envelope in given:
        if envelope is not None:
            for payload in _payloads(name, envelope, bad):
                _read(payload, found, bad)
    return RequestHints(**found, bad=bad) if found or bad else NO_HINTS


def _payloads(name: str, envelope: Any, bad: dict[str, str]) -> Iterator[Mapping[Any, Any]]:
    actions = _field(envelope, "actions")
    if not isinstance(actions, list | tuple):
        bad[name] = f"should be an object with a list of actions: {name}={shown(envelope)}"
    elif _field(envelope, "protocol_version") == ENVELOPE_VERSION:
        for action in actions[:MAX_ACTIONS]:
            if (_field(action, "action_type"), _field(action, "action_version")) == (ACTION, ACTION_VERSION):
                payload = _field(action, "payload")
                if isinstance(payload, Mapping):
                    yield payload
                else:
                    bad["payload"] = f"should be an object: payload={shown(payload)}"


def _field(holder: Any, name: str) -> Any:
    """Return a field of a JSON object, or of vLLM's own structure; None where it is missing."""
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _read(payload: Mapping[Any, Any], found: dict[str, Any], bad: dict[str, str]) -> None:
    for name, (kind, least, most) in _FIELDS.items():
        value: Any = payload.get(name)
        if type(value) is kind and least <= (len(value) if kind is str else value) <= most:
            found[name] = value
        elif value is not None:
            bad[name] = f"should be {_WANTED[kind].format(least, most)}: {name}={shown(value)}"
