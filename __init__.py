"""KV cache prefetching for vLLM: the connector in the engine, the daemon, and the shared memory between them."""

__version__ = "0.2.0.dev0"
