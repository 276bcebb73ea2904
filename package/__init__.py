"""KV cache prefetching for vLLM: the connector in the engine, the daemon, and the shared memory between them."""

try:
    from ._version import __commit_id__, __version__  # written by the build; the commit begins with "g"
except ImportError:  # sources that nobody has built
    __version__, __commit_id__ = "0.0.0+unknown", None

__all__ = ["__commit_id__", "__version__"]
