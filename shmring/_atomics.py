"""Stands in where the C extension of this name, which Python prefers, is missing: says what to do."""

import sys

raise ImportError(
    f"the C extension of kvprefetch is not built here for Python {sys.version_info.major}.{sys.version_info.minor}: "
    "install kvprefetch again with this Python and a C compiler; in a checkout: make setup",
    name=__name__,
)
