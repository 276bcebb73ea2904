"""Writes small seeded checkpoints of models with several KV groups.

Gemma 3 and MiMo-V2 have sliding windows, MiMo's with more KV heads than its full attention, Llama 4 chunks, Granite 4
states (Mamba 2), Qwen3-Next others (linear attention).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WINDOW = 64  # tokens
CHUNK = 128  # tokens


def make_gemma3(folder: Path, kv_heads: int = 1) -> Path:
    """Write the checkpoint; return its folder. Its greedy output depends on every block of the prompt."""
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=kv_heads, head_dim=64, max_position_embeddings=4096, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2, query_pre_attn_scalar=64,
    )  # fmt: skip
    return _write(folder, config)


def make_mimo(folder: Path) -> Path:
    """Write the checkpoint, without experts; return its folder. Full attention has one KV head, a window has two."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    config = {
        "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "vocab_size": 2048,
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 64, "v_head_dim": 64, "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2, "swa_head_dim": 64, "swa_v_head_dim": 64, "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 0, 0, 0], "n_routed_experts": 1, "sliding_window": WINDOW, "sliding_window_size": WINDOW,
        "max_position_embeddings": 4096, "layernorm_epsilon": 1e-5, "attention_bias": False, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    shapes = {"model.embed_tokens": (2048, 128), "lm_head": (2048, 128)}
    norms = ["model.norm"]
    for layer, window in enumerate([0, 1, 0, 1]):
        name, keys = f"model.layers.{layer}", 128 if window else 64
        shapes |= {f"{name}.self_attn.{kind}_proj": (keys if kind in "kv" else 128, 128) for kind in "qkvo"}
        shapes |= {f"{name}.mlp.gate_proj": (256, 128), f"{name}.mlp.up_proj": (256, 128)}
        shapes |= {f"{name}.mlp.down_proj": (128, 256)}
        norms += [f"{name}.input_layernorm", f"{name}.post_attention_layernorm"]
    tensors = {f"{name}.weight": torch.randn(size, generator=generator) * 0.08 for name, size in shapes.items()}
    tensors |= {f"{name}.weight": torch.ones(128) for name in norms}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def make_llama4(folder: Path, every: int = 2) -> Path:
    """Write the checkpoint, without experts; return its folder. Each `every`-th layer has no chunks."""
    import transformers

    config = transformers.Llama4TextConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, intermediate_size_mlp=256,
        num_hidden_layers=2 * every, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        max_position_embeddings=4096, attention_chunk_size=CHUNK, no_rope_layer_interval=every,
        interleave_moe_layer_step=0, moe_layers=[], num_local_experts=1, architectures=["Llama4ForCausalLM"],
    )  # fmt: skip
    return _write(folder, config)


def make_granite(folder: Path, kv_heads: int = 1) -> Path:
    """Write the checkpoint; return its folder. The state of a layer fits the bytes of a block of 32 tokens.

    vLLM's CPU build fails in a prompt's last step if a block ends inside it: let a step have little more than a block.
    """
    import transformers

    config = transformers.GraniteMoeHybridConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, shared_intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=kv_heads, max_position_embeddings=4096,
        layer_types=["mamba", "attention"] * 2, num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=4,
        mamba_d_head=64, mamba_n_groups=1, mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=32,
        position_embedding_type="rope", architectures=["GraniteMoeHybridForCausalLM"],
    )  # fmt: skip
    return _write(folder, config)


def make_qwen3_next(folder: Path) -> Path:
    """Write the checkpoint; return its folder. vLLM's CPU build runs it in bfloat16 alone.

    The state of a layer fits the bytes of a block of 32 tokens. vLLM wants a layer with experts.
    """
    import transformers

    config = transformers.Qwen3NextConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, head_dim=256, max_position_embeddings=4096,
        layer_types=["linear_attention", "full_attention"] * 2, num_experts=4, num_experts_per_tok=2,
        mlp_only_layers=[0, 1, 2], moe_intermediate_size=128, shared_expert_intermediate_size=128,
        linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=128, linear_value_head_dim=128,
        architectures=["Qwen3NextForCausalLM"],
    )  # fmt: skip
    return _write(folder, config, A_log=-3.0)  # a state that forgets slowly


def make_eagle(folder: Path) -> Path:
    """Write a layer that drafts from the hidden states of any model of hidden size 128; return its folder."""
    import torch
    import transformers
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(3)
    shapes = {
        "fc": (128, 256), "layers.0.self_attn.q_proj": (128, 128), "layers.0.self_attn.k_proj": (64, 128),
        "layers.0.self_attn.v_proj": (64, 128), "layers.0.self_attn.o_proj": (128, 128),
        "layers.0.mlp.gate_proj": (256, 128), "layers.0.mlp.up_proj": (256, 128), "layers.0.mlp.down_proj": (128, 256),
    }  # fmt: skip
    tensors = {f"{name}.weight": torch.randn(size, generator=generator) * 0.08 for name, size in shapes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(128)
    transformers.LlamaConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=4096, architectures=["EagleLlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def windows_among_chunks() -> None:
    """Let every second layer with chunks of the engine's Llama 4 have a sliding window. See EngineSpec.prepare."""
    from vllm.model_executor.models import llama4

    module: Any = llama4
    chunks = module.ChunkedLocalAttention

    def layer(*args: Any, prefix: str, attention_chunk_size: int, **options: Any) -> Any:
        if int(prefix.split(".layers.")[1].split(".")[0]) % 3 == 1:
            return module.Attention(*args, prefix=prefix, per_layer_sliding_window=WINDOW, **options)
        return chunks(*args, prefix=prefix, attention_chunk_size=attention_chunk_size, **options)

    module.ChunkedLocalAttention = layer


def windows_among_states() -> None:
    """Let the first layer of the engine's Granite 4 with attention have a sliding window. See EngineSpec.prepare."""
    from vllm.model_executor.models import granitemoehybrid

    module: Any = granitemoehybrid
    full = module.Attention

    def layer(*args: Any, prefix: str, **options: Any) -> Any:
        window = WINDOW if prefix.split(".layers.")[1].startswith("1.") else None
        return full(*args, prefix=prefix, per_layer_sliding_window=window, **options)

    module.Attention = layer


def _write(folder: Path, config: Any, **filled: float) -> Path:
    """Write a model of random weights in which what other tokens say outweighs what the last one says.

    `filled`: the values of vectors with these names, which transformers would draw without our seed.
    """
    import torch
    import transformers

    generator = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = 0.02 if "embed" in name else 0.5 if "o_proj" in name else 0.08
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif (last := name.rpartition(".")[2]) in filled:
                parameter.fill_(filled[last])
            elif "post_attention" in name or "q_norm" in name:
                parameter.fill_(3.0)
    model.save_pretrained(folder)
    return folder
