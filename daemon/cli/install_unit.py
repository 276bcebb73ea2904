"""`kvprefetchd install-unit`: write the systemd files for the environment this program runs in."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from .client import Unavailable
from .common import Commands, declare
from .help_page import Page

DROP_INS = ("gpu", "rdma", "cluster", "activation")
CONFIG = Path("/etc/kvprefetch/kvprefetchd.toml")
HOMES = ("/home", "/root", "/run/user")
PAGE = Page(
    examples=(
        ("kvprefetchd install-unit --dry-run", "see what it would write"),
        ("kvprefetchd install-unit --gpu --cluster", "as root: engines on GPUs, a Mooncake cluster over TCP"),
        ("kvprefetchd install-unit --root ./image", "for a package or an image"),
        ("kvprefetchd install-unit --user", "without root, for this user alone"),
    ),
    exits={0: "written", 69: "a file cannot be written"},
    files={
        "/etc/systemd/system/kvprefetchd.service": "the service; beside it kvprefetchd.socket, and drop-ins in "
        "kvprefetchd.service.d",
        "/etc/sysusers.d, /etc/tmpfiles.d": "kvprefetch.conf: the user kvprefetch, the folder /run/kvprefetch",
        str(CONFIG): "the configuration",
        "~/.config/systemd/user": "with --user, kvprefetchd.service",
    },
    environment={"XDG_CONFIG_HOME": "with --user, instead of ~/.config"},
    also="systemd/README.md, docs/OPERATIONS.md",
)


def add(commands: Commands) -> None:
    parser = declare(
        commands, "install-unit", "write the systemd units, and say what to do with them", run, PAGE,
        details="The units start this environment's kvprefetchd. Existing units are replaced, an existing "
        "configuration is kept. Nothing is started.",
    )  # fmt: skip
    parser.add_argument("--user", action="store_true", help="for this user's systemd instead of the system's")
    parser.add_argument("--dry-run", action="store_true", help="print the files instead of writing them")
    parser.add_argument("--root", metavar="DIR", type=Path, default=Path("/"), help="write below this folder")
    for name, text in (
        ("gpu", "let the service use NVIDIA GPUs"),
        ("rdma", "let the service use RDMA devices and the network"),
        ("cluster", "let the service reach other hosts; without it the network is loopback only"),
        ("activation", "start the service at the first connection to its socket"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=text)


def run(arguments: argparse.Namespace) -> int:
    wanted = [name for name in DROP_INS if getattr(arguments, name)]
    if arguments.user:
        files = user_files(Path.home(), os.environ)
    else:
        files = system_files(wanted, program(sys.prefix, sys.executable))
    for path, text in files.items():
        target = arguments.root / path.relative_to("/")
        if arguments.dry_run:
            print(f"# {target}\n{text}")
        elif path.name == "kvprefetchd.toml" and target.exists():
            print(f"kept     {target}")
        else:
            write(target, text)
            print(f"wrote    {target}")
    if not arguments.user:
        started = program(sys.prefix, sys.executable)[0]
        if (folder := closed(started, sys.executable)) is not None:
            print(f"note: {folder} is closed to others, so the user kvprefetch cannot start {started}:\n"
                  "      use an environment elsewhere, such as /opt/kvprefetch", file=sys.stderr)  # fmt: skip
    print("\n".join(("", "Next:", *(f"  {line}" for line in next_steps(arguments.user, "activation" in wanted)))))
    return 0


def program(prefix: str, executable: str) -> list[str]:
    """How to start this environment's kvprefetchd: its script, or the module where the script is missing."""
    script = Path(prefix) / "bin" / "kvprefetchd"
    return [str(script)] if os.access(script, os.X_OK) else [executable, "-m", "kvprefetch.daemon"]


def closed(*programs: str) -> Path | None:
    """The first folder on the way to a program, or to what it is a link to, that only its owner and group may enter."""
    ways = (way for name in programs for way in (Path(name).absolute(), Path(name).resolve()))
    folders = (folder for way in ways for folder in reversed(way.parents))
    return next((folder for folder in folders if not folder.stat().st_mode & stat.S_IXOTH), None)


def system_files(drop_ins: list[str], command: list[str]) -> dict[Path, str]:
    """Absolute paths and contents of the files for the system's systemd."""
    units = Path("/etc/systemd/system")
    homes = "read-only" if command[0].startswith(HOMES) else "yes"
    files = {
        units / "kvprefetchd.service": fill(template("kvprefetchd.service"), command, CONFIG, homes),
        Path("/etc/sysusers.d/kvprefetch.conf"): template("kvprefetch.sysusers.conf"),
        Path("/etc/tmpfiles.d/kvprefetch.conf"): template("kvprefetch.tmpfiles.conf"),
        CONFIG: template("kvprefetchd.toml"),
    }
    for name in drop_ins:
        files[units / "kvprefetchd.service.d" / f"{name}.conf"] = template(f"kvprefetchd.service.d/{name}.conf")
    if "activation" in drop_ins:
        files[units / "kvprefetchd.socket"] = template("kvprefetchd.socket")
    return files


def user_files(home: Path, environ: Mapping[str, str]) -> dict[Path, str]:
    """The same for a user's systemd."""
    folder = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    config = folder / "kvprefetch" / "kvprefetchd.toml"
    unit = fill(template("kvprefetchd-user.service"), program(sys.prefix, sys.executable), config, "yes")
    return {folder / "systemd/user/kvprefetchd.service": unit, config: template("kvprefetchd.toml")}


def template(name: str) -> str:
    return (resources.files("kvprefetch") / "systemd" / name).read_text(encoding="utf-8")


def fill(text: str, command: list[str], config: Path, homes: str) -> str:
    words = " ".join(quoted(word) for word in command)
    return (
        text.replace("@KVPREFETCHD@", words).replace("@CONFIG@", quoted(str(config))).replace("@PROTECT_HOME@", homes)
    )


def quoted(word: str) -> str:
    """A word of a command line in a unit file (systemd.service(5), "COMMAND LINES")."""
    word = word.replace("%", "%%").replace("$", "$$")
    plain = all(letter.isalnum() or letter in "/._-+%$@" for letter in word)
    return word if plain else '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def write(target: Path, text: str) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        target.chmod(0o644)
    except OSError as error:
        raise Unavailable(f"{target}: cannot be written: {error.strerror or error}") from None


def next_steps(user: bool, activation: bool) -> list[str]:
    """Commands that put the files to use."""
    if user:
        return ["systemctl --user daemon-reload", "systemctl --user enable --now kvprefetchd"]
    unit = "kvprefetchd.socket" if activation else "kvprefetchd"
    return [
        "systemd-sysusers && systemd-tmpfiles --create kvprefetch.conf",
        f"kvprefetchd check-config --config {CONFIG}",
        f"systemctl daemon-reload && systemctl enable --now {unit}",
        "usermod -aG kvprefetch USER      # for each user that runs an engine",
    ]
