"""The pages that `--help` prints: a man page's sections, in one order and form for every command."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_WIDTH = 110
_TERM_WIDTH = 28
EXITS = {
    0: "done",
    69: "the daemon, store or file that it needs does not answer or cannot be used; one line says which",
    78: "a bad command line or configuration; one line names key, value and bound",
}


@dataclass(frozen=True)
class HelpPage:
    """One command's help around its options. `examples` are (command line, purpose); other mappings have terms as keys.

    `summary` stands in the list of commands and, with `details`, above the options; the sections stand below them.
    """

    summary: str
    examples: Sequence[tuple[str, str]]
    details: str = ""
    exits: Mapping[int, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    also: str = ""

    @property
    def description(self) -> str:
        return f"{self.summary[0].upper()}{self.summary[1:]}. {self.details}".rstrip()

    @property
    def statuses(self) -> dict[int, str]:
        """Return the meaning of each exit status."""
        return EXITS | dict(self.exits)

    def sections(self) -> str:
        exits = self.statuses
        parts = [
            ("examples", [line for command, purpose in self.examples for line in (f"  {command}", f"      {purpose}")]),
            ("exit status", _rows({str(status): exits[status] for status in sorted(exits)}, width=5)),
            ("files", _rows(self.files) or ["  none"]),
            ("environment", _rows(self.environment) or ["  none"]),
        ]
        if self.also:
            also = textwrap.wrap(
                self.also, columns() - 2, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
            )
            parts.append(("see also", also))
        return "\n\n".join("\n".join([f"{name}:", *lines]) for name, lines in parts)


def _rows(terms: Mapping[str, str], *, width: int = _TERM_WIDTH) -> list[str]:
    """Return lines of terms and meanings; a term that is too long for its column has a line of its own."""
    lines = []
    for term, meaning in terms.items():
        filled = textwrap.wrap(meaning, columns() - 4 - width, break_long_words=False, break_on_hyphens=False)
        if len(term) > width - 2:
            lines.append(f"  {term}")
            term = ""
        lines += [f"  {term if i == 0 else '':<{width}}{part}" for i, part in enumerate(filled)]
    return lines


def columns() -> int:
    """Return the width of help: the terminal's, within reason."""
    return max(60, min(MAX_WIDTH, shutil.get_terminal_size().columns - 2))


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills the description's paragraphs, and leaves the sections of a HelpPage as they are."""

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
