"""Serves one attached engine: its memory, its epoch, and the store work for it."""
