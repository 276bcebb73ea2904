"""The prefetch daemon: intake, planner, fetcher, saver, staging, store, control and command line."""
