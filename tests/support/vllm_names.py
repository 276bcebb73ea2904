"""Compares what the connector uses of vLLM with a tree of vLLM's sources, and prints the differences.

`python -m tests.support.vllm_names FOLDER` (`make vllm-names` does it with the newest release): FOLDER has the folder
`vllm`. Nothing of vLLM is imported. The exit status is 1 where something differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvprefetch.connector import compat


def main(folder: Path) -> int:
    if not (folder / "vllm" / "__init__.py").is_file():
        print(f"no sources of vLLM: {folder}/vllm/__init__.py is missing", file=sys.stderr)
        return 2
    found = compat.lacks(folder)
    print("\n".join(found) or f"{folder}: all that the connector uses of vLLM is as it expects")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
