"""What `--help` says of a command: a man page's sections around click's options, in one order for every command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

SETTINGS = {"max_content_width": 110, "help_option_names": ["-h", "--help"]}
EXITS = {
    0: "done",
    69: "the daemon, store or file that it needs does not answer or cannot be used; one line says which",
    78: "a bad command line or configuration; one line names key, value and bound",
}


# What people try, and what it is here.
HINTS = {
    **dict.fromkeys(("start", "run"), "kvprefetchd serve, or systemctl start kvprefetchd"),
    **dict.fromkeys(("stop", "restart"), "the service manager does it, as systemctl restart kvprefetchd"),
    **dict.fromkeys(("log", "logs"), "kvprefetchd tail FILE, or tail --journal"),
    **dict.fromkeys(("purge", "ls"), "kvprefetchd store has it"),
    "bench": "kvprefetchd doctor --measure",
    "ping": "kvprefetchd health",
    "version": "kvprefetchd --version",
    "help": "kvprefetchd --help",
}


@dataclass(frozen=True)
class HelpPage:
    """One command's help around its options. `examples` are (command line, purpose); other mappings have terms as keys.

    `summary` stands in the list of commands and, with `details`, above the options; the sections stand below them.
    """

    summary: str
    examples: Sequence[tuple[str, str]]
    details: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    exits: Mapping[int, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    also: str = ""

    @property
    def statuses(self) -> dict[int, str]:
        return dict(sorted((EXITS | dict(self.exits)).items()))


class Command(click.Command):
    """A command with a page."""

    def __init__(self, name: str, page: HelpPage, **more: Any) -> None:
        text = f"{page.summary[0].upper()}{page.summary[1:]}. {page.details}".rstrip()
        super().__init__(name, help=text, short_help=page.summary, context_settings=SETTINGS, **more)
        self.page = page

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        page = self.page
        with formatter.section("Examples"):
            for command, purpose in page.examples:
                formatter.write(f"  {command}\n      {purpose}\n")
        statuses = {str(status): text for status, text in page.statuses.items()}
        terms = {"Arguments": page.arguments, "Exit status": statuses, "Files": page.files}
        for name, rows in (terms | {"Environment": page.environment}).items():
            if rows:
                with formatter.section(name):
                    formatter.write_dl(list(rows.items()))
        if page.also:
            with formatter.section("See also"):
                formatter.write_text(page.also)


class CommandGroup(Command, click.Group):
    """A command of commands, which are listed as they were added."""

    def __init__(self, name: str, page: HelpPage, **more: Any) -> None:
        super().__init__(name, page, no_args_is_help=False, subcommand_metavar="COMMAND", **more)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in HINTS and args[0] not in self.commands:
            ctx.fail(f"No such command {args[0]!r}: {HINTS[args[0]]}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def all_commands(self) -> dict[str, Command]:
        """Return each command by its words: `store`, `store ls`."""
        found: dict[str, Command] = {}
        for name, each in self.commands.items():
            assert isinstance(each, Command)
            found[name] = each
            if isinstance(each, CommandGroup):
                found |= {f"{name} {more}": command for more, command in each.all_commands().items()}
        return found
