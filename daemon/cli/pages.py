"""`kvprefetchd docs`: print a page that the package carries, where no checkout is."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from .common import Arguments, declare
from .help_page import Group, HelpPage

FILES = {"symptoms": "symptoms.md", "rules": "monitoring/rules.yml", "dashboard": "monitoring/dashboard.json"}
PAGE = HelpPage(
    "print a page: symptoms and cures, Prometheus' alert rules, or Grafana's dashboard",
    details="They are of this release.",
    arguments={"PAGE": "which one"},
    examples=(
        ("kvprefetchd docs symptoms", "what is wrong, and what to do"),
        ("kvprefetchd docs rules > /etc/prometheus/rules/kvprefetch.yml", "alerts"),
    ),
)


def add(commands: Group) -> None:
    declare(commands, "docs", run, PAGE, click.Argument(["page"], type=click.Choice(list(FILES))))


def run(arguments: Arguments) -> int:
    # docs/ is beside daemon/ in a checkout and in the installed package.
    sys.stdout.write((Path(__file__).parents[2] / "docs" / FILES[arguments.page]).read_text(encoding="utf-8"))
    return 0
