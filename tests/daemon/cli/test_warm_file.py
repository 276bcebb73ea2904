"""The lines that a file for `kvprefetchd warm` may have, and the errors of wrong ones."""

from __future__ import annotations

import io

import pytest

from kvprefetch.daemon.cli import prompts
from kvprefetch.daemon.cli.prompts import Hashes, Prompt, WarmLine, parse, read

AB, CD = "ab" * 32, "cd" * 32


def never(prompt: Prompt) -> list[bytes]:
    raise AssertionError(prompt)


def test_hashes_and_prompts_in_short_and_in_full() -> None:
    assert parse(f'["{AB}", "{CD}"]'.encode()) == parse(f'{{"hashes": ["{AB}", "{CD}"]}}'.encode())
    assert parse(b"[1, 2, 3]") == parse(b'{"prompt_token_ids": [1, 2, 3]}') == Prompt(prompt_token_ids=[1, 2, 3])
    assert parse(b'{"prompt_token_ids": [1], "cache_salt": "s"}') == Prompt(prompt_token_ids=[1], cache_salt="s")
    assert isinstance(parse(b'["0aff"]'), Hashes)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"what", ["not JSON"]),
        (b"7", ["one of hashes and prompt_token_ids"]),
        (b'{"hashes": ["ab"], "prompt_token_ids": [1]}', ["one of"]),
        (b'{"prompt": "text"}', ["one of"]),
        (b'{"hashes": ["ab"], "salt": "x"}', ["salt", "'x'"]),
        (b'["ab", "xyz"]', ["hashes.1", "'xyz'"]),
        (b'["ab", 7]', ["hashes.1", "7"]),
        (b'["abc"]', ["hashes.0", "'abc'"]),
        (b'["%s"]' % (b"ab" * 65), ["hashes.0"]),
        (b'{"hashes": []}', ["hashes", "at least 1"]),
        (b"[]", ["prompt_token_ids", "at least 1"]),
        (b"[1, -1]", ["prompt_token_ids.1", "-1", "greater than or equal to 0"]),
        (b"[1, 2.5]", ["prompt_token_ids.1", "2.5"]),
        (b"[1, true]", ["prompt_token_ids.1"]),
        (b'{"prompt_token_ids": [1], "cache_salt": 5}', ["cache_salt", "5"]),
        (b"[" * 100_000, ["not JSON"]),
        (b"\xff\xfe", ["not JSON"]),
    ],
)
def test_a_bad_line_is_named_by_field_and_value(line: bytes, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        parse(line)
    text = str(error.value)
    assert len(text.splitlines()) == 1
    for word in words:
        assert word in text


def test_good_lines_around_a_bad_one_are_kept_and_numbers_count_empty_lines() -> None:
    file = io.BytesIO(f'["{AB}"]\n\n  \nnonsense\n["{CD}"]'.encode())
    found = list(read(file, never))
    numbers = [(line.number, len(line.digests), bool(line.error)) for line in found]
    assert numbers == [(1, 1, False), (4, 0, True), (5, 1, False)]


def test_what_is_wrong_with_prompts_is_said_for_their_lines() -> None:
    def refusing(prompt: Prompt) -> list[bytes]:
        raise ValueError("no vLLM here")

    file = io.BytesIO(f'[1, 2]\n["{AB}"]\n'.encode())
    assert list(read(file, refusing)) == [WarmLine(1, [], "no vLLM here"), WarmLine(2, [bytes.fromhex(AB)])]


def test_a_line_that_is_too_long_is_one_bad_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_LINE_BYTES", 100)
    file = io.BytesIO(b"[" + b"1, " * 1_000_000 + b'1]\n["ab"]\n')
    found = list(read(file, never))
    assert [(line.number, line.error) for line in found] == [(1, "too long: max_bytes=100"), (2, "")]
