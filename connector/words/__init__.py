"""What both sides of the connector say: settings, orders, counts, and what requests wish."""
