"""What serves one attached engine: its memory, its epoch, and the store work done for it."""
