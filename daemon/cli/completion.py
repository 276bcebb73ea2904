"""`kvprefetchd completion`: a script with which a shell completes commands, options, choices and files."""

from __future__ import annotations

import argparse

from .common import Commands, declare
from .help_page import HelpPage

SHELLS = ("bash", "zsh", "fish")
PAGE = HelpPage(
    "print a script that completes commands, options and files in a shell",
    details="The script is of this release; print it again after an upgrade.",
    examples=(
        ("kvprefetchd completion bash > ~/.local/share/bash-completion/completions/kvprefetchd", "bash, for you alone"),
        ("kvprefetchd completion zsh > ~/.zfunc/_kvprefetchd", "zsh, with `fpath+=~/.zfunc` before compinit"),
        ("kvprefetchd completion fish > ~/.config/fish/completions/kvprefetchd.fish", "fish"),
    ),
    also="docs/reference/command-line.md",
)
_COMPLETED = {"FILE": "FILE", "PATH": "FILE", "DIR": "DIRECTORY"}  # placeholders, and their names in shtab


def add(commands: Commands) -> None:
    parser = declare(commands, "completion", run, PAGE)
    parser.add_argument("shell", metavar=f"{{{','.join(SHELLS)}}}", choices=SHELLS, help="the shell")


def run(arguments: argparse.Namespace) -> int:
    import shtab

    from .main import build_parser

    parser = build_parser()
    for each in (parser, *parser.commands.values()):
        for action in each._actions:
            name = str(action.metavar)
            if name in _COMPLETED:
                action.complete = getattr(shtab, _COMPLETED[name])  # type: ignore[attr-defined]
            elif name.startswith("{"):  # serve checks these itself, so the parser does not know the choices
                action.choices = name[1:-1].split(",")
    print(shtab.complete(parser, arguments.shell))
    return 0
