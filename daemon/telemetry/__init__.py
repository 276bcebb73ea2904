"""What the daemon says about itself: log, metrics, health, and the pictures drawn from them."""
