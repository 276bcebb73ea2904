"""The lists of what decides a block's bytes are whole, and each of their lines does what it says."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import vllm
import vllm.config
from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvprefetch.connector.identity import fingerprint, identity
from kvprefetch.connector.identity.namespace import fingerprinted, rank_keys
from kvprefetch.connector.identity.start import Start
from tests.connector.test_fingerprint import described, loaded, media, running, write_model
from tests.lab.checkpoint import TINY, make_checkpoint

SOURCES = Path(vllm.__file__).parent
START = Start("engine", "1" * 32, 2**62)
VERDICTS = {"decides", "not", "part", "own", "lines", "code"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), TINY)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, line in identity.rules("environment").items():
        if line.verdict in ("decides", "own"):
            monkeypatch.delenv(name, raising=False)


def configured(model: Path, **options: Any) -> Any:
    """What vLLM makes of `vllm serve MODEL` with these options."""
    given = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "max_model_len": 1024, **options}
    return EngineArgs(model=str(model), **given).create_engine_config()


def keys(config: Any) -> tuple[str, ...]:
    """The prefixes of an engine's keys in the store. One that shares with no other start has its own name in them."""
    plain = rank_keys(model="tiny", tp_rank=0)
    return fingerprinted(config, plain, running, START).prefixes


def alone(found: tuple[str, ...]) -> bool:
    return all(f"fp:{START.incarnation}" in each for each in found)


# --- the lists are whole ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["environment", "fields"])
def test_each_line_has_a_verdict_and_a_reason(name: str) -> None:
    for given, line in identity.rules(name).items():
        assert line.verdict in VERDICTS, given
        assert line.reason or line.verdict == "lines", given
        assert bool(line.baseline) == (line.verdict in ("decides", "code") or (name, line.verdict) == ("fields", "own"))
        assert not line.baseline or json.loads(line.baseline) in json.loads(f"[{line.baseline}]")


def read_by_vllm() -> Iterator[str]:
    """Names of variables: of vllm.envs, of each literal that os.environ or getenv gets, and all that look like one."""
    yield from envs.environment_variables
    for file in sorted(SOURCES.rglob("*.py")):
        source = file.read_text()
        yield from re.findall(r"""["'](_?VLLM_[A-Z0-9_]*[A-Z0-9])["']""", source)
        if "environ" not in source and "getenv" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            given: ast.expr | None = None
            if isinstance(node, ast.Call) and node.args and re.search(r"getenv$|environ\.\w+$", ast.unparse(node.func)):
                given = node.args[0]
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
                given = node.slice
            if isinstance(given, ast.Constant) and isinstance(given.value, str):
                yield given.value


# Constants that look like a variable's name and are none.
NONE = {"VLLM_CUTLASS"}
OLDER = "an older vLLM's: 0.31 to 0.33 do not read it"


def test_each_variable_that_vllm_reads_is_on_the_list() -> None:
    """A new vLLM's is not, and fails this test: read what it does, and write its line."""
    listed, names = identity.rules("environment"), set(read_by_vllm())
    assert len(names) > 350
    assert sorted(names - listed.keys() - NONE) == []
    assert [each for each, line in listed.items() if line.reason == OLDER and each in names] == []


def test_each_field_of_vllms_configurations_is_on_the_list() -> None:
    listed = identity.rules("fields")
    kinds = {each.partition(".")[0] for each in listed}
    for kind in kinds:
        found = next(value for value in (getattr(each, kind, None) for each in modules()) if value is not None)
        names = {f"{kind}.{field.name}" for field in dataclasses.fields(found)}
        assert sorted(names - listed.keys()) == []
    assert {type(value).__name__ for value in vars(vllm.config.VllmConfig()).values()} & kinds


def modules() -> Iterator[Any]:
    yield vllm.config
    for each in pkgutil.iter_modules(vllm.config.__path__):
        yield importlib.import_module(f"vllm.config.{each.name}")


# vLLM 0.33 has other defaults: on ROCm its engines share only with each other.
CHANGED = {"VLLM_ROCM_USE_AITER_FP4BMM", "VLLM_ROCM_USE_AITER_FP8BMM"}


def test_the_baselines_are_what_this_vllm_does_by_default(model: Path) -> None:
    """A release that changes one makes a difference: look whether its KV is another one."""
    assert identity.of_engine(configured(model), {}) == identity.Identity()
    for name, line in identity.rules("environment").items():
        if line.verdict == "decides" and name in envs.environment_variables and name not in CHANGED:
            assert identity.text(envs.environment_variables[name]()) == line.baseline, name


# --- what decides -----------------------------------------------------------------------------------------------------

VALUES = ("1", "0", "int8", "uniform_random", "medium", "INT4", "w4a8", "a16w4", "mxfp4", "bf16", '{"bits": 4}')


def other(name: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Set the variable to a value that is not its default; whether there is one."""
    before = identity.text(envs.environment_variables[name]()) if name in envs.environment_variables else ""
    for value in VALUES:
        monkeypatch.setenv(name, value)
        try:
            if name not in envs.environment_variables or identity.text(envs.environment_variables[name]()) != before:
                return True
        except ValueError:  # not one of its choices
            continue
    return False


@pytest.mark.parametrize(
    "name", [each for each, line in identity.rules("environment").items() if line.verdict == "decides"]
)
def test_a_variable_that_decides_is_in_the_key(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = described(write_model(tmp_path / "model"))
    monkeypatch.setattr(current_platform, "is_rocm", lambda: True)
    before = keys(config)
    if not other(name, monkeypatch):
        pytest.skip(f"this vLLM has no other value of {name}")
    now = keys(config)
    assert now != before
    assert not alone(now)


OPTIONS: tuple[dict[str, Any], ...] = (
    {"moe_backend": "triton"},
    {"additional_config": {"chunk": 4}},
    {"attention_config": {"use_prefill_query_quantization": True}},
    {"kernel_config": {"linear_backend": "marlin"}},
)


def test_an_option_that_decides_is_in_the_key(model: Path) -> None:
    found = [keys(configured(model, **options)) for options in ({}, *OPTIONS)]
    assert len(set(found)) == len(found)
    assert not any(map(alone, found))


# --- what nobody thought of -------------------------------------------------------------------------------------------


def test_a_variable_that_no_list_has_ends_sharing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = described(write_model(tmp_path / "model"))
    monkeypatch.setenv("VLLM_ROUND_TO_THREE_BITS", "1")
    assert alone(keys(config))
    found = fingerprinted(config, rank_keys(model="tiny", tp_rank=0), running, START)
    assert "VLLM_ROUND_TO_THREE_BITS is set" in found.unknown


def test_a_field_that_no_list_has_ends_sharing_once_it_is_not_its_default(model: Path) -> None:
    config = configured(model)
    old = config.mamba_config
    fields = [("sloppy", bool, dataclasses.field(default=False))]
    later: Any = dataclasses.make_dataclass("MambaConfig", fields, bases=(type(old),))
    before = keys(config)
    for sloppy in (False, True):
        config.mamba_config = later(sloppy=sloppy)
        assert alone(keys(config)) == sloppy
        assert sloppy or keys(config) == before


def test_foreign_code_is_in_the_key_or_ends_sharing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the files of its installed package; where no package has it, a name is no identity."""
    plain = keys(configured(model))
    own = ModelRegistry.models["LlamaForCausalLM"]
    try:
        ModelRegistry.register_model("LlamaForCausalLM", "vllm.model_executor.models.mistral:MistralForCausalLM")
        now = keys(configured(model))
        assert now != plain
        assert not alone(now)
    finally:
        ModelRegistry.models["LlamaForCausalLM"] = own
    config = configured(model)
    config.parallel_config.worker_extension_cls = "mine.Extension"
    assert alone(keys(config))
    found = set()
    for version, digest in (("1", "a"), ("1", "b"), ("2", "b")):
        install(tmp_path / f"{version}{digest}", version, digest)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / f"{version}{digest}")
            found.add(keys(config))
    assert len(found) == 3
    assert not any(map(alone, found))


def install(site: Path, version: str, digest: str) -> None:
    """A package `mine` with a plugin for vLLM, as pip leaves it."""
    info = site / f"mine-{version}.dist-info"
    info.mkdir(parents=True)
    (site / "mine.py").write_text("")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mine\nVersion: {version}\n")
    (info / "top_level.txt").write_text("mine\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nmine = mine:register\n")
    (info / "RECORD").write_text(f"mine.py,sha256={digest},0\n")


def test_a_plugin_counts_where_vllm_loads_it(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(model)
    plain = keys(config)
    install(tmp_path / "site", "1", "a")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert keys(config) != plain
    monkeypatch.setenv("VLLM_PLUGINS", "kvprefetch")
    assert keys(config) == plain


# --- no false difference ----------------------------------------------------------------------------------------------

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "3",
    "HF_HOME": "/nowhere",
    "HF_HUB_OFFLINE": "1",
    "HOME": "/home/another",
    "HOSTNAME": "node-7",
    "MASTER_ADDR": "10.0.0.7",
    "NCCL_DEBUG": "INFO",
    "OMP_NUM_THREADS": "2",
    "PYTHONHASHSEED": "7",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "USER": "another",
    "VLLM_API_KEY": "secret",
    "VLLM_ATTENTION_BACKEND": "FLASH_ATTN",
    "VLLM_CACHE_ROOT": "/home/another/.cache/vllm",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_HOST_IP": "10.0.0.7",
    "VLLM_LOGGING_LEVEL": "DEBUG",
    "VLLM_LOGGING_PREFIX": "node 7 ",
    "VLLM_PORT": "tcp://10.0.0.1:8000",
    "VLLM_PORT_8000_TCP_ADDR": "10.0.0.1",
    "VLLM_ROUTER_SERVICE_HOST": "10.0.0.1",
    "VLLM_SERVICE_PORT_HTTP": "80",
    "VLLM_USE_V1": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
SAME: tuple[dict[str, Any], ...] = (
    {"max_model_len": 2048},
    {"seed": 7, "served_model_name": "another", "max_num_seqs": 3, "max_num_batched_tokens": 2048},
    {"enforce_eager": False, "kv_cache_memory_bytes": 1 << 30, "disable_log_stats": True},
    {"generation_config": "vllm", "override_generation_config": {"temperature": 0.5}},
    {"master_addr": "10.0.0.7", "master_port": 29600, "gpu_memory_utilization": 0.5, "download_dir": "/nowhere"},
    {"tensor_parallel_size": 1, "load_format": "safetensors", "enable_chunked_prefill": False},
)


def test_what_changes_no_byte_changes_no_key(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that never hits is worthless: starts, nodes, users, lengths, batches, ports, logs, seeds."""
    config = configured(model)
    plain = keys(config)
    assert not alone(plain)
    for options in SAME:
        assert keys(configured(model, **options)) == plain, options
    assert keys(configured(make_checkpoint(tmp_path / "elsewhere", TINY))) == plain
    for name, value in ENVIRONMENT.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert keys(config) == plain, name


def test_two_users_with_the_same_files_of_the_hub_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a cache of their own (`HF_HOME`), with another node's paths; a third has a newer main."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    found = []
    for user, size in (("one", 64), ("two", 64), ("three", 128)):
        cache = tmp_path / user / "hub"
        repository = cache / "models--team--tiny"
        commit = f"{size:040}"
        (repository / "snapshots").mkdir(parents=True)
        write_model(repository / "snapshots" / commit, size)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
        found.append(keys(described("team/tiny")))
    assert found[0] == found[1] != found[2]
    assert not any(map(alone, found))


def other_release(config: Any, *, later: bool) -> Any:
    """With the fields that the lists know of other releases, at their defaults; or without those that decide here."""
    kind, listed = type(config), identity.rules("fields")
    mine = {each.name: each for each in dataclasses.fields(kind)}
    own = {name: listed[f"{kind.__name__}.{name}"].verdict for name in mine}
    made = [(name, Any, dataclasses.field(default=7)) for name in ("of_no_list",) if later]
    for key, line in listed.items():
        if later and key.partition(".")[0] == kind.__name__ and (name := key.partition(".")[2]) not in own:
            value = json.loads(line.baseline or "null")
            made.append((name, Any, dataclasses.field(default=value[0] if line.verdict == "code" else value)))
    kept = {name: field for name, field in mine.items() if later or own[name] != "decides"}
    added: Any = dataclasses.make_dataclass("Added", made)
    fields = {"__dataclass_fields__": {**kept, **added.__dataclass_fields__}}
    found: Any = object.__new__(type(kind.__name__, (kind, added), fields))
    found.__dict__.update(vars(config))
    for name in own:
        if own[name] == "lines" and getattr(config, name) is not None:
            setattr(found, name, other_release(getattr(config, name), later=later))
    return found


def test_releases_with_more_or_fewer_fields_share(model: Path) -> None:
    config = configured(model)
    earlier, later = (other_release(config, later=each) for each in (False, True))
    assert "of_no_list" in {each.name for each in dataclasses.fields(later.model_config)}
    assert len(dataclasses.fields(earlier.kernel_config)) < len(dataclasses.fields(config.kernel_config))
    assert keys(config) == keys(earlier) == keys(later)
    later.kernel_config.of_no_list = 8
    assert alone(keys(later))


def test_a_switch_of_rocm_counts_there_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its defaults are not those of vLLM 0.31, and engines elsewhere share with that."""
    config = described(write_model(tmp_path / "model"))
    plain = keys(config)
    monkeypatch.setenv("VLLM_ROCM_USE_AITER_FP8BMM", "0")
    assert keys(config) == plain
    monkeypatch.setattr(current_platform, "is_rocm", lambda: True)
    assert keys(config) != plain


def test_engines_that_are_not_in_doubt_keep_the_keys_that_they_had(tmp_path: Path) -> None:
    """The digests of release 0.1.0's format, before there were lists."""
    folder = write_model(tmp_path / "model")
    found = [
        fingerprint.digest(fingerprint.fitting({**running(), **loaded(folder, **changes)}))
        for changes in ({}, {"multimodal_config": media()}, {"quantization": "fp8"})
    ]
    assert found == [
        "1dc7288ee4a315489442878025dc004d",
        "16d0ffdaee60f415ea09c0006fdba84c",
        "2c0f833a4f7e6e1cab291ae6268808c2",
    ]


def test_the_lists_have_the_fields_of_every_spec_that_is_served() -> None:
    listed = {*fingerprint.DECIDING, *fingerprint.OTHERS}
    served = (
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        SlidingWindowMLASpec,
        ChunkedLocalAttentionSpec,
        MambaSpec,
    )
    for kind in served:
        assert {field.name for field in dataclasses.fields(kind)} <= listed
