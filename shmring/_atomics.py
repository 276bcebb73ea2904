"""Stand-in for a missing C extension of this name (Python prefers the extension): the error says what to do."""

import sys

raise ImportError(
    f"the C extension of kvprefetch is not built here for Python {sys.version_info.major}.{sys.version_info.minor}: "
    "install kvprefetch again with this Python and a C compiler; in a checkout: make setup",
    name=__name__,
)
