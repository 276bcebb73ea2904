"""GPU memory for both sides: find a device, share memory with another process, copy and launch."""
