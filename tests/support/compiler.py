"""Skips tests that compile C++, where there is no compiler: PyTorch does so for engines of several ranks."""

from __future__ import annotations

import shutil

import pytest

needs_cxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
