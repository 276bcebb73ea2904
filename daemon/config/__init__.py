"""The configuration: its model, where its values come from, and what the machine gives this process."""
