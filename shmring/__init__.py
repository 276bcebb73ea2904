"""Shared memory between one engine and one daemon: segments, ring, completion flags, credits, doorbell, liveness."""
