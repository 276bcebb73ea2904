"""An engine's paged KV cache, and the memory that copies go to and come from."""
