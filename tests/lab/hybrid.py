"""Writes a small seeded Gemma 3 checkpoint: layers with sliding windows beside layers with full attention."""

from __future__ import annotations

from pathlib import Path

WINDOW = 64  # tokens


def make_gemma3(folder: Path, kv_heads: int = 1) -> Path:
    """Write (or find) the checkpoint; return its folder. Its greedy output depends on every block of the prompt."""
    import torch
    import transformers

    if (folder / "config.json").exists():
        return folder
    config = transformers.Gemma3TextConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=kv_heads, head_dim=64, max_position_embeddings=4096, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2, query_pre_attn_scalar=64,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.02 if "embed" in name else 0.08))
            elif "post_attention" in name or "q_norm" in name:
                parameter.fill_(3.0)  # what other tokens say outweighs what the last one says
    model.save_pretrained(folder)
    return folder
