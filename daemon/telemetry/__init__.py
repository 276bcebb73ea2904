"""The daemon's log, metrics and health, and the pictures drawn from them."""
