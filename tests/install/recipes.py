"""Follows a recipe of CONTRIBUTING.md in a checkout: `python -m tests.install.recipes metric` (or `policy`), run there.

It makes the changes that a contributor would write, prints the tables by the recipe's own commands, and runs the tests
of what it changed. It fails where the recipe leaves out what a test asks for.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PYTHON = ".venv-check/bin/python"
PLACES = {"metrics": "docs/METRICS.md", "connector": "docs/reference/configuration.md"}


class Recipe(NamedTuple):
    """Its heading, what is written behind which words of which files, and which tests are run."""

    heading: str
    written: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]
    then: tuple[str, ...] = ()  # a command


RECIPES = {
    "metric": Recipe(
        "Add a metric",
        (
            (
                "daemon/telemetry/metrics.py",
                '"bad_records": _counter("Hint-ring records that were skipped"),\n',
                '    "hinted_blocks": _counter("Blocks of the prompts of hints"),\n',
            ),
            (
                "daemon/engine/epoch.py",
                'self.counters.add("hints")\n',
                '        self.counters.add("hinted_blocks", hint.blocks)\n',
            ),
            ("daemon/telemetry/counters.py", "_LOGGED = (\n", '    "hinted_blocks",\n'),
            ("docs/EVENTS.md", "`saves_queued`, `hints`, ", "`hinted_blocks`, "),
            (
                "docs/EVENTS.md",
                "| `hints` | integer | hints read |\n",
                "| `hinted_blocks` | integer | blocks of the prompts of its hints |\n",
            ),
            (
                "tests/daemon/engine/test_epoch.py",
                "    yield engine\n    engine.leave()\n",
                "\n\ndef test_the_blocks_of_hints_are_counted(engine: Engine) -> None:\n"
                '    engine.stage((0, 1), *"abc")\n'
                '    assert engine.epoch.counters["hinted_blocks"] == 3\n',
            ),
        ),
        ("tests/daemon/telemetry", "tests/daemon/engine/test_epoch.py", "tests/test_docs.py", "tests/test_house.py"),
    ),
    "policy": Recipe(
        "Add a wait policy",
        (
            ("connector/policy.py", '"timeout", "adaptive"', ', "half"'),
            (
                "connector/policy.py",
                'if wait.policy == "best_effort":\n            return Verdict.TAKE\n',
                '        if wait.policy == "half" and 2 * now_ns >= wait.began_ns + wait.bound_ns:\n'
                "            return Verdict.LATE\n",
            ),
            (
                "docs/reference/configuration.md",
                "| `best_effort` | never waits |\n",
                "| `half` | waits for half of `wait_timeout_ms` |\n",
            ),
            (
                "benchmarks/simulate/waiting.py",
                'Policy("timeout", "waits up to 5 s", "timeout"),\n',
                '        Policy("half", "waits up to 2.5 s", "half"),\n',
            ),
            (
                "tests/connector/test_policy.py",
                "    assert look(policy, patient, 0, 5000, first=False) is Verdict.LATE\n",
                "\n\ndef test_half_waits_for_half_of_the_bound(policy: WaitPolicy) -> None:\n"
                '    wait = begin("half")\n'
                "    assert [look(policy, wait, 0, at) for at in (0, 2499)] == [Verdict.WAIT] * 2\n"
                "    assert look(policy, wait, 0, 2500) is Verdict.LATE\n",
            ),
        ),
        (
            "tests/connector/test_policy.py",
            "tests/connector/test_config.py",
            "tests/test_readme.py",
            "tests/test_docs.py",
        ),
        ("-c", "from benchmarks.simulate.scenarios import run_named as run; run('poisson', 'half', 200, 0)"),
    ),
}


def main(name: str) -> None:
    recipe = RECIPES[name]
    section = Path("CONTRIBUTING.md").read_text().split(f"### {recipe.heading}\n")[1].split("\n##")[0]
    tables = re.findall(r"(?:tests\.support\.|… )documents (\w+)|`… (\w+)`", section)
    names = [first or second for first, second in tables]
    assert names, f"{recipe.heading} names no table"
    before = {table: printed(table) for table in names}
    for file, words, text in recipe.written:
        insert(file, words, text)
    if name == "metric":
        show_in_a_panel("kvprefetchd_hinted_blocks_total")
    for table, old in before.items():
        assert PLACES[table] in section, f"where the table goes: {table}"
        replace(PLACES[table], old, printed(table))
    subprocess.run(["make", "lint", "VENV=.venv-check"], check=True)
    markers = "not store and not vllm and not stress"
    subprocess.run([PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", markers, *recipe.tests], check=True)
    if recipe.then:
        subprocess.run([PYTHON, *recipe.then], check=True)


def printed(table: str) -> str:
    command = [PYTHON, "-m", "tests.support.documents", table]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def insert(file: str, words: str, text: str) -> None:
    replace(file, words, words + text)


def replace(file: str, old: str, new: str) -> None:
    text = Path(file).read_text()
    assert text.count(old) == 1, f"{file} has this {text.count(old)} times: {old}"
    Path(file).write_text(text.replace(old, new))


def show_in_a_panel(metric: str) -> None:
    """Add a line to the first panel that shows the hints."""
    file = Path("docs/monitoring/dashboard.json")
    dashboard = json.loads(file.read_text())
    shown = (panel.get("targets", []) for panel in dashboard["panels"])
    targets = next(each for each in shown if "kvprefetchd_hints_total" in json.dumps(each))
    expression = f'sum(rate({metric}{{instance=~"$instance"}}[$__rate_interval]))'
    targets.append({**targets[-1], "refId": chr(ord(targets[-1]["refId"]) + 1), "expr": expression})
    file.write_text(json.dumps(dashboard, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
