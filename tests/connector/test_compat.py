"""Which vLLM is served: tried series, newer ones after a look at their sources, and the reasons for the others."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path

import pytest

vllm = pytest.importorskip("vllm")

import kvprefetch.connector as package  # noqa: E402
from kvprefetch.connector import compat  # noqa: E402
from kvprefetch.connector.connector import KVPrefetchConnector  # noqa: E402
from tests.connector.test_connector import SCHEDULER, WORKER, kv_cache_config, vllm_config  # noqa: E402
from tests.support import vllm_names  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = Path(vllm.__path__[0]).parent
BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
NEXT = "0.34.0"


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0+cu129", "0.33.1"])
def test_a_tried_release_is_served_without_a_word(version: str) -> None:
    assert compat.verdict(version, Path("/nowhere")) == ""


@pytest.mark.parametrize("version", ["0.30.2", "0.9.1", "0.1.dev1+g1234567", "unknown"])
def test_an_older_release_is_refused_in_one_line(version: str) -> None:
    with pytest.raises(
        ValueError, match=rf"too old: vllm={re.escape(version)} min=0\.31 max=0\.33 \(install"
    ) as caught:
        compat.verdict(version, INSTALLED)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", [NEXT, "1.0.0", "0.33.1.dev12+g1234567"])
def test_a_newer_release_with_all_that_is_used_is_served_with_a_warning(version: str) -> None:
    warning = compat.verdict(version, INSTALLED)
    assert f"no test has run this vLLM: vllm={version} tried=0.31 to 0.33" in warning


def environments() -> list[tuple[str, Path]]:
    """Series and sources of the installed vLLM, and of those that `make test-vllm-versions` built."""
    built = [path for path in sorted(ROOT.glob("build/vllm/*/lib/python*/site-packages")) if (path / "vllm").exists()]
    installed = ".".join(vllm.__version__.split(".")[:2])
    return [(installed, INSTALLED), *((path.parents[2].name, path) for path in built)]


@pytest.mark.parametrize(("series", "folder"), environments())
def test_the_releases_at_hand_have_all_that_the_connector_uses(series: str, folder: Path) -> None:
    assert series in compat.TRIED
    assert compat.lacks(folder) == []


def overlay(folder: Path, file: str, old: str, new: str) -> Path:
    """A tree that is the installed vLLM but for some text of one file."""
    here, there = folder / "vllm", INSTALLED / "vllm"
    for part in file.split("/"):
        here.mkdir()
        for each in there.iterdir():
            if each.name != part:
                (here / each.name).symlink_to(each)
        here, there = here / part, there / part
    text = there.read_text()
    assert old in text
    here.write_text(text.replace(old, new))
    return folder


UTILS, INTERFACE = "v1/core/kv_cache_utils.py", "v1/kv_cache_interface.py"
STATS = "    def get_kv_connector_stats"
CHANGES = [
    (BASE, "def on_new_request(self, request", "def on_new_request(self, request, queue", "hook on_new_request: par"),
    (BASE, "def handle_preemptions(", "def before_preemptions(", "hook handle_preemptions: missing"),
    (BASE, STATS, f"    @abstractmethod\n    def flush(self): ...\n\n{STATS}", "hook flush: not known here"),
    (BASE, "class SupportsHMA(", "class SupportsHybrid(", "base.SupportsHMA: missing"),
    ("v1/request.py", "self.session_id", "self.session", "request.Request.session_id: missing"),
    ("v1/request.py", "WAITING_FOR_REMOTE_KVS", "WAITING_FOR_LOAD", "RequestStatus.WAITING_FOR_REMOTE_KVS: missing"),
    ("v1/core/sched/output.py", "total_num_scheduled_tokens", "total_tokens", "total_num_scheduled_tokens: missing"),
    ("v1/core/kv_cache_manager.py", "def get_computed_blocks(", "def get_blocks_at(", "get_computed_blocks: missing"),
    ("config/speculative.py", "def use_eagle_block_drop(self", "def use_eagle_block_drop(self, of", "block_drop: par"),
    (UTILS, "def to_event_extra_keys(", "def to_event_keys(", "to_event_extra_keys: missing"),
    (UTILS, "def hash_block_tokens(\n", "def hash_block_tokens(\n    kind,\n", "hash_block_tokens: par"),
    ("distributed/kv_events.py", "    session_id:", "    session:", "BlockStored.session_id: missing"),
    (INTERFACE, "class SlidingWindowMLASpec(", "class WindowMLASpec(", "SlidingWindowMLASpec: missing"),
]


@pytest.mark.parametrize(("file", "old", "new", "finding"), CHANGES)
def test_a_newer_release_that_differs_is_refused_with_the_difference(
    tmp_path: Path, file: str, old: str, new: str, finding: str
) -> None:
    with pytest.raises(ValueError, match=rf"differs .*vllm=0\.34\.0 .*{re.escape(finding)}") as caught:
        compat.verdict(NEXT, overlay(tmp_path, file, old, new))
    assert "\n" not in str(caught.value)


def test_the_class_is_not_even_imported_with_a_vllm_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks for it, and its imports might fail: the reason would be lost in a traceback."""
    monkeypatch.setattr(vllm, "__version__", "0.30.0")
    monkeypatch.delitem(vars(package), "connector")
    with pytest.raises(ValueError, match=r"vllm=0\.30\.0"):
        _ = package.KVPrefetchConnector
    assert "connector" not in vars(package)


def test_only_the_scheduler_warns_of_a_release_that_no_test_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", NEXT)
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_rank", lambda: 0)
    with caplog.at_level(logging.WARNING):
        for role in (WORKER, SCHEDULER):
            KVPrefetchConnector(vllm_config(tmp_path / "s"), role, kv_cache_config()).shutdown()
    assert ["no test has run" in line.getMessage() for line in caplog.records].count(True) == 1


def test_what_is_read_of_requests_and_configurations_is_in_the_table() -> None:
    """By the names that the connector gives to these objects."""
    listed = {name.partition("(")[0] for names in compat.USED.values() for name in names.split()}
    given = {"request", "vllm_config", "parallel", "kv_cache_config", "output", "connector_output", "transfer", "model"}
    read = set()
    for path in (ROOT / "connector").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            whole = ast.unparse(node.value)
            owner = whole.rpartition(".")[2]
            if (owner in given or owner.endswith("_config")) and whole not in {"self._config", "model"}:
                read.add(node.attr)
    assert len(read) > 40
    assert read <= listed | {"to_dict"}, "what `transformers` offers aside"


def test_the_script_names_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vllm_names.main(INSTALLED) == 0
    assert vllm_names.main(tmp_path) == 2
    assert vllm_names.main(overlay(tmp_path, "v1/request.py", "self.session_id", "self.session")) == 1
    assert "vllm.v1.request.Request.session_id: missing" in capsys.readouterr().out
