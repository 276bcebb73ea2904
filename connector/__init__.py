"""The vLLM plugin: KVPrefetchConnector, its scheduler side and its worker side."""
