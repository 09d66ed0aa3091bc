"""Makes `tools/` importable, so that the training code is tested as `train_tiny`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
