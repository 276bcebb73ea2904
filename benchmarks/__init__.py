"""Programs that show and measure kvprefetch against real vLLM and real Mooncake."""
