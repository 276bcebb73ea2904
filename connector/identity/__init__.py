"""What names KV: the model, its weights, its adapters, and all that decides the bytes of a block."""
