"""The KV groups that vLLM makes of the models people serve, and whether the connector serves an engine with them.

`.venv/bin/python -m tests.support.gallery` prints the table of docs/reference/models.md, or the rows of models named.
Each model is built without weights from the numbers of its class in transformers, and on no device: what it wants of
CUDA for that has a stand-in.  Its layers' KV goes through vLLM's own `get_kv_cache_configs` and the checks of an
engine's start.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

MEMORY_BYTES = 1 << 40
HEAD = (
    "| models | vLLM's class | KV groups, with their layers | block: tokens, KiB | |",
    "| --- | --- | --- | --- | --- |",
)
# Engines of vLLM's CPU build, or of the bed, have run with groups of these kinds.
RUN = (
    {"full"},
    {"full", "window"},
    {"full", "chunk"},
    {"full", "state"},
    {"full", "ring"},
    {"full", "ring", "replayed"},
)


# Memory layouts of vLLM's attention on CPUs; for layers with pages of unlike sizes, those of its attention on GPUs.
LAYOUTS, PACKED = ["LBNHC", "LBHNC", "BLNHC", "BLHNC"], ["BLNHC", "BLHNC"]


class Model(NamedTuple):
    """A class of vLLM's, the type of its configuration, and numbers that this type lacks; None: that it has not."""

    architecture: str
    kind: str
    numbers: Mapping[str, Any] = MappingProxyType({})
    layouts: Sequence[str] = LAYOUTS


MODELS = {
    "Llama 2 and 3": Model("LlamaForCausalLM", "llama"),
    "Llama 4": Model("Llama4ForConditionalGeneration", "llama4"),
    "Qwen3": Model("Qwen3ForCausalLM", "qwen3"),
    "Qwen3 MoE": Model("Qwen3MoeForCausalLM", "qwen3_moe"),
    "Qwen3-VL": Model("Qwen3VLForConditionalGeneration", "qwen3_vl"),
    "Qwen3-Next": Model("Qwen3NextForCausalLM", "qwen3_next"),
    "Qwen3.5 and 3.6": Model("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    "Qwen3.5 and 3.6 MoE": Model("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    "Qwen4": Model("Qwen4ExpForCausalLM", "qwen4_exp_text", {"output_gate_type": "sigmoid"}),
    "DeepSeek-V3, R1; Kimi K2": Model("DeepseekV3ForCausalLM", "deepseek_v3"),
    "DeepSeek-V3.2": Model("DeepseekV32ForCausalLM", "deepseek_v32"),
    "DeepSeek-V4": Model(
        "DeepseekV4ForCausalLM",
        "deepseek_v4",
        # Layers by how many tokens they compress into one: what vLLM's class of the configuration has in their place.
        {
            "compress_ratios": [128, 128, *[128, 4] * 20, 128],
            "num_hash_layers": 3,
            **dict.fromkeys(("mlp_layer_types", "layer_types", "compress_rates")),
        },
        PACKED,
    ),
    "Kimi K2.5": Model("KimiK25ForConditionalGeneration", "kimi_k25"),
    "Kimi Linear": Model("KimiLinearForCausalLM", "kimi_linear"),
    "GLM-4.5 to 4.7": Model("Glm4MoeForCausalLM", "glm4_moe", {"head_dim": 128}),
    "GLM-5": Model("GlmMoeDsaForCausalLM", "glm_moe_dsa"),
    "MiniMax-M2": Model("MiniMaxM2ForCausalLM", "minimax_m2", {"rotary_dim": 64, "scoring_func": "sigmoid"}),
    "gpt-oss": Model("GptOssForCausalLM", "gpt_oss"),
    "Gemma 3": Model("Gemma3ForConditionalGeneration", "gemma3"),
    "Gemma 4": Model("Gemma4ForCausalLM", "gemma4_text"),
    "Mistral 7B v0.1": Model("MistralForCausalLM", "mistral"),
    "Mistral Small 3": Model("Mistral3ForConditionalGeneration", "mistral3"),
    "Nemotron-H": Model("NemotronHForCausalLM", "nemotron_h"),
    "Granite 4 H": Model(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", {"layer_types": [*["mamba"] * 7, "attention"] * 4}
    ),
    "Falcon-H1": Model("FalconH1ForCausalLM", "falcon_h1"),
    "Phi-3 and 4": Model("Phi3ForCausalLM", "phi3"),
    "OLMo 3": Model("Olmo3ForCausalLM", "olmo3"),
    "Command A": Model("Cohere2ForCausalLM", "cohere2"),
    "EXAONE 4": Model("Exaone4ForCausalLM", "exaone4"),
    "ERNIE 4.5 MoE": Model("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
    "Seed-OSS": Model("SeedOssForCausalLM", "seed_oss"),
    "SmolLM3": Model("SmolLM3ForCausalLM", "smollm3"),
}


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for torchvision, which models for pictures import; the shape of their KV does not depend on it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        class Module(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return MagicMock()

        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def configured(folder: Path, model: Model) -> str:
    """Write the model's config.json, and return the folder."""
    import transformers

    transformers.AutoConfig.for_model(model.kind).save_pretrained(folder)
    numbers = json.loads((folder / "config.json").read_text()) | model.numbers | {"architectures": [model.architecture]}
    kept = {name: each for name, each in numbers.items() if each is not None or name not in model.numbers}
    (folder / "config.json").write_text(json.dumps(kept))
    return str(folder)


def row(name: str, folder: Path) -> str:
    """Return the model's row. It initialises torch's process group: one call a process."""
    import torch
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    from kvprefetch.connector.engine import geometry, refusals

    sys.meta_path.append(Absent())
    torch.cuda.Event = torch.Event = MagicMock()  # type: ignore[misc]
    patch("torch.cpu._is_avx512_bf16_supported", return_value=True).start()  # where not, states have another type
    model = MODELS[name]
    # vLLM looks at a class that it has not loaded in a process of its own, which has no stand-in.
    ModelRegistry.register_model(model.architecture, ModelRegistry.models[model.architecture].load_model_cls())
    options = {"load_format": "dummy", "dtype": "bfloat16", "enable_prefix_caching": True, "language_model_only": True}
    config = EngineArgs(model=configured(folder, model), skip_tokenizer_init=True, **options).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with torch.device("meta"), set_default_torch_dtype(torch.bfloat16):
            initialize_model(vllm_config=config)
        current_platform.update_block_size_for_backend(config)
        config.cache_config.enable_prefix_caching = True  # most CPUs have none with MLA
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        specs = {each: spec for each, layer in layers.items() if (spec := layer.get_kv_cache_spec(config)) is not None}
        resolve_kv_cache_layout(config, [[*model.layouts]], specs.values())
        (found,) = get_kv_cache_configs(config, [specs], [MEMORY_BYTES])
        made = [(type(each.kv_cache_spec).__name__, len(each.layer_names)) for each in found.kv_cache_groups]
        size = f"{found.kv_cache_tensors[0].size // found.num_blocks >> 10:,}"
        try:
            refusals.check(config, found)
            rules = geometry.rules_of(config, found)
        except ValueError as error:
            why = str(error).partition("connector: ")[2]
            kinds = "; ".join(f"{kind.removesuffix('Spec')}: {count}" for kind, count in made)
            return f"| {name} | `{model.architecture}` | {kinds} | {size} | refused: {why} |"
        of_cache = dict(zip(found.prefix_cacheable_group_ids, rules.groups, strict=True))
        groups = [
            (*kind_of(of_cache.get(number), each.kv_cache_spec), len(each.layer_names))
            for number, each in enumerate(found.kv_cache_groups)
        ]
        parts = []
        for (kind, window), same in groupby(sorted(groups), key=lambda each: each[:2]):
            counts = [count for *_, count in same]
            size_of = " to ".join(map(str, sorted({counts[0], counts[-1]})))
            times = f"{len(counts)} groups of {size_of}" if len(counts) > 1 else size_of
            parts.append(f"{kind}{f' {window:,}' if window else ''}: {times}")
        what = "served" if {kind for kind, *_ in groups} in RUN else "untried"
        return f"| {name} | `{model.architecture}` | {'; '.join(parts)} | {rules.unit_tokens}, {size} | {what} |"


def kind_of(group: Any, spec: Any) -> tuple[str, int]:
    """Return the kind of a group and its window; without rules (`group`) it is outside the prefix cache."""
    if group is not None:
        return group.kind.value, group.window_tokens
    return ("replayed", spec.prefix_replay_tokens) if spec.prefix_replay_tokens else ("ring", 0)


def rows(names: list[str]) -> list[str]:
    """Return the rows of these models, each made in a process of its own."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    import vllm.engine.arg_utils  # noqa: F401  # once for all of them

    lines = []
    for name in names:
        ours, theirs = os.pipe()
        with tempfile.TemporaryDirectory() as folder:
            if not (child := os.fork()):
                try:
                    line = row(name, Path(folder))
                except BaseException as error:
                    said = str(error).strip().splitlines() or [""]
                    told = next((each.strip() for each in said if "Value error, " in each), said[-1])
                    what = f"{type(error).__name__}: {told.partition(' [type=')[0].rstrip('.')}"
                    line = f"| {name} | `{MODELS[name].architecture}` | | | not made here: {what} |"
                os.write(theirs, line.encode())
                os._exit(0)
            os.close(theirs)
            with open(ours) as written:
                lines.append(written.read())
            os.waitpid(child, 0)
    return lines


if __name__ == "__main__":
    print("\n".join([*HEAD, *rows(sys.argv[1:] or list(MODELS))]))
