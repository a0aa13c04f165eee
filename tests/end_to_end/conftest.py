"""Makes this folder's helpers, and the table of the recovery tests, importable."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "recovery")]
