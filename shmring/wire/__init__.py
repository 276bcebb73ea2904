"""What engine and daemon send each other: ring records, messages of the control socket, and how both are encoded."""
