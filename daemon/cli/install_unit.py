"""`kvprefetchd install-unit`: write the systemd files for this program's environment."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from kvprefetch.client.control import Unavailable

from .common import PATH, Arguments, declare, flag, option
from .help_page import CommandGroup, HelpPage

DROP_INS = {
    "gpu": "let the service use NVIDIA GPUs",
    "rdma": "let the service use RDMA devices and the network",
    "cluster": "let the service reach other machines; without it the network is loopback only",
    "logfile": "write the log to /var/log/kvprefetch instead of the journal",
    "activation": "start the service at the first connection to its socket",
}
NOTIFY_RELOAD = 253  # the first systemd with Type=notify-reload
CONFIG = Path("/etc/kvprefetch/kvprefetchd.toml")
HOMES = ("/home", "/root", "/run/user")
PAGE = HelpPage(
    "write the systemd units, and the commands that put them to use",
    details="The units start this environment's kvprefetchd. It replaces existing units, keeps an existing "
    "configuration, and starts nothing.",
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
        "/etc/sysusers.d, /etc/tmpfiles.d": "kvprefetch.conf: the user kvprefetch, the folders /run/kvprefetch and "
        "/var/log/kvprefetch",
        "/etc/logrotate.d": "kvprefetchd: rotates the files of --logfile",
        str(CONFIG): "the configuration",
        "~/.config/systemd/user": "with --user, kvprefetchd.service",
    },
    environment={"XDG_CONFIG_HOME": "with --user, instead of ~/.config"},
    also="systemd/README.md, docs/OPERATIONS.md",
)


def add(commands: CommandGroup) -> None:
    declare(
        commands,
        "install-unit",
        run,
        PAGE,
        flag("--user", "for this user's systemd instead of the system's"),
        flag("--dry-run", "print the files instead of writing them"),
        option("--root", metavar="DIR", type=PATH, default="/", help="write below this folder"),
        *(flag(f"--{name}", text) for name, text in DROP_INS.items()),
    )


def run(arguments: Arguments) -> int:
    wanted = [name for name in DROP_INS if getattr(arguments, name)]
    command = program(sys.prefix, sys.executable)
    files = user_files(Path.home(), os.environ, command) if arguments.user else system_files(wanted, command)
    reloads = arguments.root == Path("/") and systemd_version() >= NOTIFY_RELOAD
    for path, text in files.items():
        text = waiting_for_reloads(text) if reloads else text
        target = arguments.root / path.relative_to("/")
        if arguments.dry_run:
            print(f"# {target}\n{text}")
        elif path.name == "kvprefetchd.toml" and target.exists():
            print(f"kept     {target}")
        else:
            write(target, text)
            print(f"wrote    {target}")
    if not arguments.user and (folder := closed(command[0], sys.executable)) is not None:
        note = f"note: {folder} is closed to others, so the user kvprefetch cannot start {command[0]}:"
        print(f"{note}\n      use an environment elsewhere, such as /opt/kvprefetch", file=sys.stderr)
    print("\n".join(("", "Next:", *(f"  {line}" for line in next_steps(arguments.user, "activation" in wanted)))))
    return 0


def program(prefix: str, executable: str) -> list[str]:
    """Return the command that starts this environment's kvprefetchd: its script, or the module without a script."""
    script = Path(prefix) / "bin" / "kvprefetchd"
    return [str(script)] if os.access(script, os.X_OK) else [executable, "-m", "kvprefetch.daemon"]


def closed(*programs: str) -> Path | None:
    """Return the first folder on the way to a program, or to its link's target, that only owner and group may enter."""
    ways = (way for name in programs for way in (Path(name).absolute(), Path(name).resolve()))
    folders = (folder for way in ways for folder in reversed(way.parents))
    return next((folder for folder in folders if not folder.stat().st_mode & stat.S_IXOTH), None)


def system_files(drop_ins: list[str], command: list[str]) -> dict[Path, str]:
    """Return absolute paths and contents of the files for the system's systemd."""
    units = Path("/etc/systemd/system")
    homes = "read-only" if command[0].startswith(HOMES) else "yes"
    files = {
        units / "kvprefetchd.service": fill(template("kvprefetchd.service"), command, CONFIG, homes),
        Path("/etc/sysusers.d/kvprefetch.conf"): template("kvprefetch.sysusers.conf"),
        Path("/etc/tmpfiles.d/kvprefetch.conf"): template("kvprefetch.tmpfiles.conf"),
        Path("/etc/logrotate.d/kvprefetchd"): template("kvprefetchd.logrotate"),
        CONFIG: template("kvprefetchd.toml"),
    }
    for name in drop_ins:
        files[units / "kvprefetchd.service.d" / f"{name}.conf"] = template(f"kvprefetchd.service.d/{name}.conf")
    if "activation" in drop_ins:
        files[units / "kvprefetchd.socket"] = template("kvprefetchd.socket")
    return files


def user_files(home: Path, environ: Mapping[str, str], command: list[str]) -> dict[Path, str]:
    """Return the same for a user's systemd."""
    folder = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    config = folder / "kvprefetch" / "kvprefetchd.toml"
    unit = fill(template("kvprefetchd-user.service"), command, config, "yes")
    return {folder / "systemd/user/kvprefetchd.service": unit, config: template("kvprefetchd.toml")}


def template(name: str) -> str:
    """Return a file of systemd/, which is beside daemon/ in a checkout and in the installed package."""
    return (Path(__file__).parents[2] / "systemd" / name).read_text(encoding="utf-8")


def fill(text: str, command: list[str], config: Path, homes: str) -> str:
    words = " ".join(quoted(word) for word in command)
    return (
        text.replace("@KVPREFETCHD@", words).replace("@CONFIG@", quoted(str(config))).replace("@PROTECT_HOME@", homes)
    )


def systemd_version() -> int:
    """Return the release of this machine's systemd; 0 without one."""
    try:
        done = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    found = re.match(r"systemd (\d+)", done.stdout)
    return int(found[1]) if found else 0


def waiting_for_reloads(text: str) -> str:
    """Return a unit of which `systemctl reload` waits until the daemon is done (docs/adr/0152)."""
    return re.sub(r"^(#.*\n)?ExecReload=.*\n", "", text, flags=re.M).replace("Type=notify\n", "Type=notify-reload\n")


def quoted(word: str) -> str:
    """Return a word as a unit's command line needs it (systemd.service(5), "COMMAND LINES")."""
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
    if user:
        return ["systemctl --user daemon-reload", "systemctl --user enable --now kvprefetchd"]
    unit = "kvprefetchd.socket" if activation else "kvprefetchd"
    return [
        "systemd-sysusers && systemd-tmpfiles --create kvprefetch.conf",
        f"kvprefetchd check-config --config {CONFIG}",
        f"systemctl daemon-reload && systemctl enable --now {unit}",
        "usermod -aG kvprefetch USER      # for each user that runs an engine",
    ]
