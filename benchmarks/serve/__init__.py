"""Real load through the HTTP server of `vllm serve`: recorded traces, scaled to a tiny model."""
