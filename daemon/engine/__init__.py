"""What serves one attached engine: its memory, its session, and the store work done for it."""
