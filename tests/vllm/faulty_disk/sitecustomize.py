"""Imported by every Python process that has this folder on its path: its files fail as a file says, if one is named.

vLLM starts processes of its own, and those keep segments.
"""

import os
from pathlib import Path

if given := os.environ.get("CHUNKWEAVE_TEST_DISK"):
    from tests.adversary.forks import Disk

    control, _, root = given.partition(os.pathsep)
    Disk(Path(control), Path(root)).install()
