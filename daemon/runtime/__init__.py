"""The life of the daemon process: the main loop, the service manager, reloads, and what it needs to start."""
