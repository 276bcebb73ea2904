"""The daemon process: start and stop, the main loop, periodic work, signals, reloads, and the service manager."""
