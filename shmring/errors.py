"""What can go wrong with shared memory: misuse by us, or corruption by the other side."""


class SegmentCorrupt(Exception):
    """What the other side wrote cannot be true; nothing read from this segment may be trusted any more."""


class SegmentError(OSError):
    """A segment could not be created or mapped (no room in shared memory, wrong size, wrong magic)."""


class DeviceError(Exception):
    """What CUDA or cupy said, in one line."""
