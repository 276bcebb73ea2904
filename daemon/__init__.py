"""The prefetch daemon: intake, planner, saver, staging, store, control and command line."""
