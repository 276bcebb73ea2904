"""Decides which blocks to fetch next, into which slots, for which request. Pure: no store, no clock, no memory."""
