"""Settings of the bed's worker, and how they reach it: through the environment."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from tests.lab.bed.timeline import Preset

VARIABLE = "BED"


@dataclass(frozen=True)
class Settings:
    """`preset`: of the timeline; without one, steps take no time. `every_step`: as of Device.

    `given`: a layout whose specifications the worker gives instead of the model's (`layouts.given_specs`).
    """

    preset: Preset | None = None
    every_step: bool = True
    given: str = ""

    @classmethod
    def read(cls) -> Settings:
        given = json.loads(os.environ.get(VARIABLE, "{}"))
        preset = given.pop("preset", None)
        return cls(None if preset is None else Preset(**preset), **given)

    def variable(self) -> dict[str, str]:
        """Return the environment of an engine with these settings."""
        return {VARIABLE: json.dumps(asdict(self))}
