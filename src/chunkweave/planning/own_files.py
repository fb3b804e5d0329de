"""Which files in a model's cache folder are ours but no segments."""

from chunkweave.planning.calibration_file import CALIBRATION_FILE, PARTIAL_FILE
from chunkweave.planning.cost_file import COST_FILE

OWN_FILES = frozenset({COST_FILE, CALIBRATION_FILE, PARTIAL_FILE})
