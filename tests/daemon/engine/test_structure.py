"""The parts of the engine are pulled: none keeps something to call but the way to it. Constructors are small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvprefetch.daemon
from kvprefetch.daemon.engine.device import DeviceStaging
from kvprefetch.daemon.engine.epoch_parts import EpochParts, Services
from tests.daemon.engine.epochs import Engine, announced, digest, later_weights, make_epoch
from tests.support.fakecuda import UUID, machine, needs_fake

MAX_PARAMETERS = 6
PARTS = ("kvprefetch.daemon.engine.", "kvprefetch.daemon.planning.")


def kept_callables(thing: Any, name: str, seen: set[int]) -> Iterator[str]:
    """Yield each attribute of a part, or of what it holds, that can be called."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, dict):
        thing = [*thing.keys(), *thing.values()]
    if isinstance(thing, (list, tuple, set, frozenset)) or type(thing).__name__ == "deque":
        for each in thing:
            yield from kept_callables(each, f"{name}[]", seen)
    if not type(thing).__module__.startswith(PARTS):
        return
    slots = [slot for kind in type(thing).__mro__ for slot in getattr(kind, "__slots__", ())]
    values = {slot: getattr(thing, slot) for slot in slots if hasattr(thing, slot)} | getattr(thing, "__dict__", {})
    for attribute, value in values.items():
        if callable(value) and not isinstance(value, type) and not isinstance(thing, (EpochParts, Services)):
            yield f"{name}.{attribute}"
        yield from kept_callables(value, f"{name}.{attribute}", seen)


@needs_fake
def test_no_part_of_an_epoch_keeps_something_to_call() -> None:
    """With every part at work: a fetch, a put, a look-up, a reset and an announcement are under way."""
    machine()
    epoch = make_epoch()
    engine = Engine(epoch)
    engine.stage((0, 1), "a", "b")
    engine.want((1, 1), "c")
    epoch.announce(announced("d"), digest("d"), lambda _: None)
    epoch.reset(later_weights())
    device = DeviceStaging([4096], [UUID], budget_bytes=4 << 20, margin_bytes=0)
    assert list(kept_callables([epoch, device], "", set())) == []
    engine.leave()
    device.close()


def test_a_part_that_keeps_something_to_call_is_found() -> None:
    epoch = make_epoch()
    epoch.saver.tell = print  # type: ignore[attr-defined]
    epoch.parts.look_ups.ports = [len]  # type: ignore[attr-defined]
    assert list(kept_callables(epoch, "epoch", set())) == ["epoch.parts.saver.tell"]
    del epoch.saver.tell, epoch.parts.look_ups.ports  # type: ignore[attr-defined]
    Engine(epoch).leave()


def test_constructors_have_at_most_six_parameters() -> None:
    root = Path(kvprefetch.daemon.__file__).parent
    found = []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs) - 1
                if count > MAX_PARAMETERS:
                    found.append(f"{path.name}:{node.lineno}: {count}")
    assert found == []
