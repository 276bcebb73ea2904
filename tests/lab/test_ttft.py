"""What `make bench-ttft` refuses before it starts anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import ttft
from tests.lab import lmcache


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="2"):
        ttft.main(arguments)
    return capsys.readouterr().err.splitlines()[-1]


def test_lmcache_is_no_variant_without_its_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is it run by default: the choices of the message are what a default run has."""
    said = refusal(["--variants", "local,lmcache"], capsys)
    assert said.endswith("unknown variants ['lmcache']: choose from local,recompute,upstream-sync,upstream-async,ours")


@pytest.mark.vllm
def test_an_interpreter_without_lmcache_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One line says what it lacks; so does one that is not there."""
    (tmp_path / "redis-server").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal(["--lmcache-python", sys.executable], capsys).endswith(f"{sys.executable} lacks ['lmcache']")
    assert "No such file or directory: '/nowhere'" in refusal(["--lmcache-python", "/nowhere"], capsys)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "redis-server is not installed" in refusal(["--lmcache-python", sys.executable], capsys)


def test_an_interpreter_whose_packages_hide_ours_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its engines could not import `tests.lab`: an installed package wins over a folder without `__init__.py`."""
    (tmp_path / "redis-server").touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    packages = tmp_path / "packages"
    for name in ("lmcache", "vllm", "tests"):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncd / && PYTHONPATH={packages} exec {sys.executable} -S "$2" "$3"\n')
    python.chmod(0o755)
    assert refusal(["--lmcache-python", str(python)], capsys).endswith("hides ours: pip uninstall cufile-python")
    (packages / "tests" / "__init__.py").unlink()
    (packages / "tests").rmdir()
    assert lmcache.missing(python) is None
