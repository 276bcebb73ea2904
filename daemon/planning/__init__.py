"""What to fetch next, into which slots, for whom: pure decisions, tested without a store, a clock or memory."""
