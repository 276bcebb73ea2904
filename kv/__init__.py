"""What a block of KV is, for both sides: KV groups and what a prefix needs of each, prompts, keys, hashes."""

MAX_GROUPS = 32  # KV groups of one engine
