"""What an engine of vLLM is: its releases' differences, its KV groups and blocks, its steps."""
