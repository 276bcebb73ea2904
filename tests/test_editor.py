"""An editor's way through the package: imports across its rooms lead to tracked files. mypy resolves each import."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("connector", "daemon", "kv", "package", "shmring")


def program(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed (make test does it)")
    return found


@pytest.fixture(scope="module", autouse=True)
def links() -> None:
    subprocess.run(["make", "--silent", "links"], cwd=ROOT, check=True)


class Editor:
    """A language server, and the requests that an editor makes of it."""

    def __init__(self) -> None:
        command = [program("basedpyright-langserver"), "--stdio"]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        self._number = 0
        folder = {"uri": ROOT.as_uri(), "name": "root"}
        self.ask("initialize", processId=None, rootUri=ROOT.as_uri(), capabilities={}, workspaceFolders=[folder])
        self._send("initialized", {})

    def close(self) -> None:
        self._server.kill()
        self._server.communicate()

    def _send(self, method: str, params: dict[str, Any], number: int | None = None) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params} | ({"id": number} if number else {})
        assert self._server.stdin is not None
        body = json.dumps(message).encode()
        self._server.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._server.stdin.flush()

    def ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        self._send(method, params, self._number)
        while (message := self._receive()).get("id") != self._number or "method" in message:
            pass
        return message["result"]

    def _receive(self) -> dict[str, Any]:
        out = self._server.stdout
        assert out is not None
        size = 0
        while (line := out.readline().strip()) or not size:
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        received: dict[str, Any] = json.loads(out.read(size))
        return received

    def definition(self, path: Path, line: int, column: int) -> list[Path]:
        """Where "go to definition" leads from here; lines and columns count from 0."""
        document = {"uri": path.as_uri(), "languageId": "python", "version": 1, "text": path.read_text()}
        self._send("textDocument/didOpen", {"textDocument": document})
        at = {"line": line, "character": column}
        found = self.ask("textDocument/definition", textDocument={"uri": path.as_uri()}, position=at)
        self._send("textDocument/didClose", {"textDocument": {"uri": path.as_uri()}})
        return [Path(each["uri"].removeprefix("file://")).resolve() for each in found]


def imports() -> Iterator[tuple[tuple[str, str], Path, int, int]]:
    """Yield for each pair of rooms one import of the second in the first: the file, and where the name stands."""
    seen = set()
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            lines = path.read_text().splitlines()
            for node in ast.parse("\n".join(lines)).body:
                if not isinstance(node, ast.ImportFrom) or not (node.level or (node.module or "").startswith("kvp")):
                    continue
                module = node.module or ""
                target = module.removeprefix("kvprefetch").strip(".").split(".")[0]
                across = node.level > len(path.relative_to(ROOT / room).parts) or module.startswith("kvp")
                pair = (room, (target or "kvprefetch") if across else room)
                if pair not in seen and lines[node.lineno - 1].split("#")[0].rstrip()[-1] != "(":
                    seen.add(pair)
                    yield pair, path, node.lineno - 1, node.names[0].col_offset


def test_definitions_are_in_tracked_files() -> None:
    tracked = {ROOT / name for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()}
    tracked.add(ROOT / "package" / "_version.py")  # the build writes it
    editor = Editor()
    try:
        found = {pair: editor.definition(path, line, column) for pair, path, line, column in imports()}
    finally:
        editor.close()
    assert {("connector", "shmring"), ("daemon", "client"), ("package", "daemon"), ("daemon", "daemon")} <= set(found)
    astray = {pair: paths for pair, paths in found.items() if not paths or not set(paths) <= tracked}
    assert astray == {}
