"""The protocol of engine and daemon: ring records, messages of the control socket, and their encoding."""
