"""Shared memory between one engine and one daemon: segments, rings, completion flags, doorbell, liveness."""
