"""`kvprefetchd completion`: a script with which a shell completes commands, options, choices and files."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from .common import Arguments, declare
from .help_page import Group, HelpPage

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_KVPREFETCHD_COMPLETE"  # the script sets it and runs kvprefetchd at each press of Tab
PAGE = HelpPage(
    "print a script that completes commands, options and files in a shell",
    details="The script asks the kvprefetchd that is on the PATH.",
    arguments={"SHELL": "the shell"},
    examples=(
        ("kvprefetchd completion bash > ~/.local/share/bash-completion/completions/kvprefetchd", "bash, for you alone"),
        ("kvprefetchd completion zsh > ~/.zfunc/_kvprefetchd", "zsh, with `fpath+=~/.zfunc` before compinit"),
        ("kvprefetchd completion fish > ~/.config/fish/completions/kvprefetchd.fish", "fish"),
    ),
    also="docs/reference/command-line.md",
)


def add(commands: Group) -> None:
    declare(commands, "completion", run, PAGE, click.Argument(["shell"], type=click.Choice(SHELLS)))


def run(arguments: Arguments) -> int:
    kind = get_completion_class(arguments.shell)
    assert kind is not None
    print(kind(click.Command("kvprefetchd"), {}, "kvprefetchd", VARIABLE).source())
    return 0
