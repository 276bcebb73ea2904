"""The scheduler side: one engine's requests, from vLLM's input thread to their ends."""
