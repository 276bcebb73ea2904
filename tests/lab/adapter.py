"""A LoRA adapter of a tiny model, with seeded weights."""

from __future__ import annotations

import json
from pathlib import Path


def make_adapter(path: Path, seed: int) -> str:
    """Write a LoRA adapter of a tiny model's keys and values, in place of one that is there."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        for module in ("k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, 128, generator=generator) * 0.2
            tensors[f"{name}.lora_B.weight"] = torch.randn(64, 8, generator=generator) * 0.2
    path.mkdir(exist_ok=True)
    save_file(tensors, str(path / "new"))
    (path / "new").rename(path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["k_proj", "v_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)
