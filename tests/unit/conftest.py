"""Tests import benchmark and training scripts as modules."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / folder) for folder in ("benchmarks", "benchmarks/gpu", "training")]
