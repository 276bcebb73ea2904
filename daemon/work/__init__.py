"""Blocking store calls on threads: pools, deadlines, and how many calls run at a time."""
