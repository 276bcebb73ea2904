"""Makes wrong values from valid ones: a few places of a JSON value, or of bytes, change."""

from __future__ import annotations

import copy
import random
from typing import Any

JUNK: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 255, 2**31, 2**32, 2**63, 2**64, -(2**63), 1e308, -0.5),
    *("", " ", "\0", "\ud800", "x" * 5000, "a@b", "../..", "%s{0}", "1e9", "-1", "\n{}", "é"),
    *([], {}, [[]], [0] * 3000, ["x"] * 300, {"a": {"a": {"a": {}}}}, {"": None}),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return each (container, key or index) below a value."""
    found, left = [], [value]
    while left:
        here = left.pop()
        keys = here.keys() if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else ()
        for key in keys:
            found.append((here, key))
            left.append(here[key])
    return found


def mutated(source: random.Random, value: Any) -> Any:
    """Return a copy in which one to three places are replaced, removed, doubled or exchanged."""
    value = copy.deepcopy(value)
    for _ in range(source.randint(1, 3)):
        if not (all_places := places(value)):
            return source.choice(JUNK)
        container, key = source.choice(all_places)
        match source.randrange(8):
            case 0:
                del container[key]
            case 1 if isinstance(container, list):
                container.extend(container[: source.randint(1, 50)])
            case 2:
                other, at = source.choice(all_places)
                container[key] = copy.deepcopy(other[at]) if _holds(other, at) else None
            case 3 if isinstance(container[key], str):
                container[key] = _spelt(source, container[key])
            case 4 if isinstance(container[key], int):
                container[key] += source.choice((-1, 1, 2**31, -(2**31), 2**63))
            case 5 if isinstance(container, dict):
                container[source.choice(("more", "type", "", "\u202e", key * 2 if isinstance(key, str) else "k"))] = 1
            case _:
                container[key] = copy.deepcopy(source.choice(JUNK))
    return value


def _holds(container: Any, key: Any) -> bool:
    return key in container if isinstance(container, dict) else key < len(container)


def _spelt(source: random.Random, text: str) -> str:
    at = source.randint(0, len(text))
    return text[:at] + source.choice(("", "\0", "x", "-", "9" * 30, text, "\ud800")) + text[at + source.randint(0, 2) :]


def flipped(source: random.Random, data: bytes) -> bytes:
    """Return bytes of which some changed, were cut off or added."""
    changed = bytearray(data)
    for _ in range(source.randint(0, 4)):
        if changed:
            changed[source.randrange(len(changed))] = source.choice((0, 1, 127, 128, 255, source.randrange(256)))
    match source.randrange(4):
        case 0:
            return bytes(changed[: source.randint(0, len(changed))])
        case 1:
            return bytes(changed) + source.randbytes(source.randint(0, 64))
        case _:
            return bytes(changed)
