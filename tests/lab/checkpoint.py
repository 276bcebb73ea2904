"""Writes small seeded Llama checkpoints: their greedy output depends on every block of the prompt.

vLLM's ``dummy`` weights give nearly the same tokens for any prefix, so a comparison of tokens would prove nothing.
Normal weights with a standard deviation of about 0.08 do not.

``python -m tests.lab.checkpoint [DIR]`` writes one and prints its folder: a model to serve without a download.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Part of the name of every checkpoint: raise it when the writer changes what it writes.
FORMAT = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a checkpoint; equal shapes give equal bytes."""

    hidden: int = 128
    intermediate: int = 256
    layers: int = 4
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    vocab: int = 2048
    positions: int = 4096
    dtype: str = "float32"
    std: float = 0.08
    seed: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, all layers."""
        value_bytes = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return 2 * self.layers * self.kv_heads * self.head_dim * value_bytes


# Tests: an engine with it starts quickly and a step costs little.
TINY = Shape()
# As TINY with two KV heads, so that two tensor-parallel ranks hold different halves.
TINY_TP2 = Shape(hidden=256, heads=4, kv_heads=2)
# The published comparison: 2 KiB of KV per token, 64 KiB per block of 32, recompute several times slower than loading.
PEERS = Shape(hidden=512, intermediate=1024, layers=8, heads=8, kv_heads=1, head_dim=64, dtype="bfloat16")


def make_checkpoint(directory: Path | str, shape: Shape = TINY) -> Path:
    """Write (or find) the checkpoint of ``shape``; return its folder.

    The folder's name carries a hash of the shape: different shapes never share keys in a store.
    """
    fields = json.dumps({"format": FORMAT, **asdict(shape)}, sort_keys=True)
    name = f"llama-{shape.hidden}x{shape.layers}-{shape.dtype}-{hashlib.sha256(fields.encode()).hexdigest()[:10]}"
    final = Path(directory).resolve() / name
    if (final / "config.json").is_file():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place when complete: a killed writer or two at once never leave half a checkpoint under the name.
    partial = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=final.parent))
    try:
        _write(partial, shape)
        partial.chmod(0o755)
        os.rename(partial, final)
    except OSError:
        if not (final / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def _write(folder: Path, shape: Shape) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(shape.seed)
    dtype: torch.dtype = getattr(torch, shape.dtype)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float32).mul_(shape.std).to(dtype)

    def ones() -> torch.Tensor:
        return torch.ones(shape.hidden, dtype=dtype)

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = {"model.embed_tokens.weight": normal(shape.vocab, shape.hidden)}
    for index in range(shape.layers):
        layer = f"model.layers.{index}"
        tensors[f"{layer}.input_layernorm.weight"] = ones()
        tensors[f"{layer}.self_attn.q_proj.weight"] = normal(queries, shape.hidden)
        tensors[f"{layer}.self_attn.k_proj.weight"] = normal(keys, shape.hidden)
        tensors[f"{layer}.self_attn.v_proj.weight"] = normal(keys, shape.hidden)
        tensors[f"{layer}.self_attn.o_proj.weight"] = normal(shape.hidden, queries)
        tensors[f"{layer}.post_attention_layernorm.weight"] = ones()
        tensors[f"{layer}.mlp.gate_proj.weight"] = normal(shape.intermediate, shape.hidden)
        tensors[f"{layer}.mlp.up_proj.weight"] = normal(shape.intermediate, shape.hidden)
        tensors[f"{layer}.mlp.down_proj.weight"] = normal(shape.hidden, shape.intermediate)
    tensors["model.norm.weight"] = ones()
    tensors["lm_head.weight"] = normal(shape.vocab, shape.hidden)
    weights = folder / "model.safetensors"
    save_file(tensors, str(weights), metadata={"format": "pt"})
    weights.chmod(0o644)  # save_file lets only this user read it, and an engine may run as another user
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": shape.dtype,
    }
    _write_tokenizer(folder, shape.vocab)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer with a token per byte, and names for the rest of the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<unk>", "<s>", "</s>"]
    words = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"<{number}>" for number in range(len(words), vocab)]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": special[0],
        "bos_token": special[1],
        "eos_token": special[2],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    print(make_checkpoint(sys.argv[1] if len(sys.argv) > 1 else "build/checkpoints", PEERS))
