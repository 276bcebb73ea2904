"""What a block of KV is, for both sides: KV groups and what a prefix needs of each, prompts, and the keys of blocks."""

MAX_GROUPS = 32  # KV groups of one engine
