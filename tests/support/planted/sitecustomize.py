"""Plants a fault in one module of the package, in every process that has this folder on its path.

PLANTED: JSON with `module`, and the text `old`, which becomes `new` in its source.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class Planter(importlib.abc.MetaPathFinder):
    """Finds the module as ever, and changes its source."""

    def __init__(self, module: str, old: str, new: str) -> None:
        self.module, self.old, self.new = module, old, new

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = Changed(name, spec.origin)
        spec.loader.planter = self
        return spec


class Changed(importlib.machinery.SourceFileLoader):
    """Reads the source with the fault, and keeps no compiled file of it."""

    planter: Planter

    def get_code(self, name: str) -> object:  # type: ignore[override]
        source = self.get_data(self.path).decode()
        if source.count(self.planter.old) != 1:
            print(f"PLANTED: the text is not there once: {self.planter.old}", file=sys.stderr)
            os._exit(99)
        return compile(source.replace(self.planter.old, self.planter.new), self.path, "exec")


if "PLANTED" in os.environ:
    sys.meta_path.insert(0, Planter(**json.loads(os.environ["PLANTED"])))
