"""`kvprefetchd docs` and `completion`: print a page of the package, or a script that completes commands in a shell."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from .common import Arguments, declare
from .help_page import CommandGroup, HelpPage

FILES = {"symptoms": "symptoms.md", "rules": "monitoring/rules.yml", "dashboard": "monitoring/dashboard.json"}
SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_KVPREFETCHD_COMPLETE"  # the script sets it and runs kvprefetchd at each press of Tab
DOCS = HelpPage(
    "print a page: symptoms and cures, Prometheus' alert rules, or Grafana's dashboard",
    details="They are of this release.",
    arguments={"PAGE": "which one"},
    examples=(
        ("kvprefetchd docs symptoms", "what is wrong, and what to do"),
        ("kvprefetchd docs rules > /etc/prometheus/rules/kvprefetch.yml", "alerts"),
    ),
)
COMPLETION = HelpPage(
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


def add(commands: CommandGroup) -> None:
    page, shell = (
        click.Argument([name], type=click.Choice(list(of))) for name, of in (("page", FILES), ("shell", SHELLS))
    )
    declare(commands, "docs", run_docs, DOCS, page)
    declare(commands, "completion", run_completion, COMPLETION, shell)


def run_docs(arguments: Arguments) -> int:
    # docs/ is beside daemon/ in a checkout and in the installed package.
    sys.stdout.write((Path(__file__).parents[2] / "docs" / FILES[arguments.page]).read_text(encoding="utf-8"))
    return 0


def run_completion(arguments: Arguments) -> int:
    kind = get_completion_class(arguments.shell)
    assert kind is not None
    print(kind(click.Command("kvprefetchd"), {}, "kvprefetchd", VARIABLE).source())
    return 0
