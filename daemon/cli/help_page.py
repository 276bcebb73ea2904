"""How `--help` looks: what man pages have, in the same order and words for every command."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_WIDTH = 110
_TERM_WIDTH = 28

DONE = {0: "done"}
UNAVAILABLE = {69: "what it needs does not answer or cannot be used (daemon, store, a file); one line says which"}
CONFIG = {78: "a bad command line or configuration; one line names key, value and bound"}


@dataclass(frozen=True)
class Page:
    """What stands below the options. `examples` are (command line, what it is for); the other keys are the terms."""

    examples: Sequence[tuple[str, str]]
    exits: Mapping[int, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    also: str = ""

    def text(self) -> str:
        exits = DONE | UNAVAILABLE | CONFIG | dict(self.exits)
        return "\n\n".join([
            _section("examples", [part for line, what in self.examples for part in (f"  {line}", f"      {what}")]),
            _section("exit status", rows({str(status): exits[status] for status in sorted(exits)}, width=5)),
            _section("files", rows(self.files) or ["  none"]),
            _section("environment", rows(self.environment) or ["  none"]),
            *([_section("see also", _indented(self.also))] if self.also else []),
        ])  # fmt: skip


def rows(terms: Mapping[str, str], *, width: int = _TERM_WIDTH) -> list[str]:
    """Lines of a table of terms and what they mean; a term too long for its column gets a line of its own."""
    lines = []
    for term, meaning in terms.items():
        filled = textwrap.wrap(meaning, columns() - 4 - width, break_long_words=False, break_on_hyphens=False)
        if len(term) > width - 2:
            lines.append(f"  {term}")
            term = ""
        lines += [f"  {term if i == 0 else '':<{width}}{part}" for i, part in enumerate(filled)]
    return lines


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, columns() - 2, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _section(name: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{name}:", *lines])


def columns() -> int:
    """How wide help is written: as the terminal, within reason."""
    return max(60, min(MAX_WIDTH, shutil.get_terminal_size().columns - 2))


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Paragraphs of the description are filled; what begins with a section's name is set already."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_TERM_WIDTH + 2, width=columns())

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):  # argparse forgets that the list of commands is indented
            self._action_max_length += self._indent_increment

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        return "\n\n".join(textwrap.fill(part, width, break_on_hyphens=False) for part in text.split("\n\n"))
