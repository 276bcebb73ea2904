"""The command line `kvprefetchd`: one module per command; `add(commands)` declares it, its `run` does it."""
