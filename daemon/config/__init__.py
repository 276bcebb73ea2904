"""The configuration: its model, its sources, its sizes, and the machine's limits for this process."""
