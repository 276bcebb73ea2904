"""Writes small seeded checkpoints of models with several KV groups.

Gemma 3 has sliding windows, Llama 4 chunks, Granite 4 states (Mamba 2).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

WINDOW = 64  # tokens
CHUNK = 128  # tokens


def make_gemma3(folder: Path, kv_heads: int = 1) -> Path:
    """Write (or find) the checkpoint; return its folder. Its greedy output depends on every block of the prompt."""
    import transformers

    if (folder / "config.json").exists():
        return folder
    config = transformers.Gemma3TextConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=kv_heads, head_dim=64, max_position_embeddings=4096, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2, query_pre_attn_scalar=64,
    )  # fmt: skip
    _write(folder, config)
    return folder


def make_llama4(folder: Path) -> Path:
    """Write (or find) the checkpoint, without experts; return its folder."""
    import transformers

    if (folder / "config.json").exists():
        return folder
    config = transformers.Llama4TextConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, intermediate_size_mlp=256, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, max_position_embeddings=4096,
        attention_chunk_size=CHUNK, no_rope_layer_interval=2, interleave_moe_layer_step=0, moe_layers=[],
        num_local_experts=1, architectures=["Llama4ForCausalLM"],
    )  # fmt: skip
    _write(folder, config)
    return folder


def make_granite(folder: Path, kv_heads: int = 1) -> Path:
    """Write (or find) the checkpoint; return its folder. The state of a layer fits the bytes of a block of 32 tokens.

    vLLM's CPU build fails in a prompt's last step if a block ends inside it: let a step have little more than a block.
    """
    import transformers

    if (folder / "config.json").exists():
        return folder
    config = transformers.GraniteMoeHybridConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, shared_intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=kv_heads, max_position_embeddings=4096,
        layer_types=["mamba", "attention"] * 2, num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=4,
        mamba_d_head=64, mamba_n_groups=1, mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=32,
        position_embedding_type="rope", architectures=["GraniteMoeHybridForCausalLM"],
    )  # fmt: skip
    _write(folder, config)
    return folder


def _write(folder: Path, config: Any) -> None:
    """Write a model of random weights in which what other tokens say outweighs what the last one says."""
    import torch
    import transformers

    generator = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = 0.02 if "embed" in name else 0.5 if "o_proj" in name else 0.08
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif "post_attention" in name or "q_norm" in name:
                parameter.fill_(3.0)
    model.save_pretrained(folder)
