"""The commands of `kvprefetchd`, one module each: `add(commands)` declares it, its `run` does it."""
