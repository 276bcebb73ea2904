"""`kvprefetchd mode`: what off and shadow do to look-ups, loads and saves of an attached engine, and the way back.

`kvprefetchd reload` says what came of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvprefetch.shmring.wire.records import FlagState, Outcome
from tests.daemon.stores import blocks, engine_with, stored
from tests.lab.daemon import Daemon
from tests.support.auditor import ask_daemon
from tests.support.command import kvprefetchd
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually


def switch(path: Path, mode: str) -> str:
    result = kvprefetchd("mode", mode, "--socket", path)
    assert result.returncode == 0, result.stderr
    return result.stdout


def missed(engine: FakeEngine, digests: list[bytes], name: str) -> None:
    key = engine.hint(digests, name=name)
    assert engine.settled(key).state == FlagState.READY
    assert engine.flag(key).count == 0
    engine.cancel(key, Outcome.MISS)


def test_off_misses_shadow_counts_on_loads(serve: Callable[..., Daemon]) -> None:
    daemon = serve()
    engine, values = engine_with(daemon, "mode", 4)
    assert "off (was on)" in switch(daemon.socket, "off")
    assert ask_daemon(daemon.socket).mode == "off"
    missed(engine, list(values), "while-off")
    line = daemon.wait_record("request.done")
    assert line is not None
    assert (line["found_blocks"], line["looked_up_ms"], line["bytes"]) == (0, None, 0)

    # Slots that the engine holds already can be filled once; then it has none left, and nothing was put.
    while engine.credits.available():
        engine.save(blocks(f"dropped-{engine.credits.available()}", engine.credits.available()))
    eventually(lambda: int(ask_daemon(daemon.socket).engines[0]["save_slots_busy"]) > 0, what="slots held back")
    assert engine.credits.available() == 0
    assert sum(line["stored_blocks"] for line in daemon.records("save.done")) == 4

    switch(daemon.socket, "shadow")
    missed(engine, list(values), "in-shadow")
    line = daemon.wait_record("request.done", count=2)
    assert line is not None
    assert (line["found_blocks"], line["bytes"], line["outcome"]) == (4, 0, "miss")

    switch(daemon.socket, "on")
    assert engine.load(list(values)) == list(values.values())
    more = blocks("more", 3)
    engine.save(more)
    stored(daemon, 7)
    assert engine.load(list(more)) == list(more.values())


def test_an_engine_that_attaches_while_off_gets_misses(serve: Callable[..., Daemon]) -> None:
    daemon = serve(extra=("--mode", "off"))
    engine = FakeEngine(daemon.socket)
    missed(engine, list(blocks("late", 2)), "late")
    switch(daemon.socket, "on")
    values = blocks("late", 2)
    engine.save(values)
    stored(daemon, 2)
    assert engine.load(list(values)) == list(values.values())


def test_a_reload_says_what_came_of_it_and_fails_where_the_daemon_took_nothing(
    serve: Callable[..., Daemon], tmp_path: Path
) -> None:
    config = tmp_path / "kvprefetchd.toml"
    config.write_text("max_engines = 3\n")
    daemon = serve(extra=("--config", str(config)))

    def reload(text: str) -> tuple[int, str]:
        config.write_text(text)
        result = kvprefetchd("reload", "--socket", daemon.socket)
        assert result.stderr == ""
        return result.returncode, result.stdout.rstrip("\n")

    assert reload("max_engines = 3\n") == (0, "the daemon took over: nothing, since no key differs")
    taken = "the daemon took over: max_engines; needs a restart: fetch_threads"
    assert reload("max_engines = 5\nfetch_threads = 3\n") == (0, taken)
    status, said = reload("max_engine = 1\n")
    assert status == 1
    assert said.startswith("the daemon took over nothing: ")
    assert said.endswith("did you mean max_engines?")
    assert [line["key"] for line in daemon.records("config.changed")] == ["max_engines"]
