"""The connection to the daemon: it starts, says hello, is kept, and tells of resets."""
