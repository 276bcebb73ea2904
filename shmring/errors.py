"""The errors of shared memory and device memory."""


class SegmentCorrupt(Exception):
    """The other side wrote an impossible value: trust nothing that was read from this segment."""


class SegmentError(OSError):
    """A segment cannot be created or mapped: no room in shared memory, wrong size, not sealed."""


class DeviceError(Exception):
    """A call to CUDA failed; the text is one line."""
