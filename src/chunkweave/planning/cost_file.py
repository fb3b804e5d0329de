"""Where a model's cost model lies in a cache folder."""

import logging
from pathlib import Path

from chunkweave.errors import DocumentError
from chunkweave.planning.cost_model import CostModel

logger = logging.getLogger(__name__)

COST_FILE = "cost-model.json"


def cost_model_path(cache_dir: Path, fingerprint: str) -> Path:
    """Where `chunkweave profile` writes it, and where it is looked for."""
    return cache_dir / fingerprint / COST_FILE


def stored_cost_model(cache_dir: Path | None, fingerprint: str) -> CostModel | None:
    """The cost model measured for this cache folder and model, if there is one that can be read.

    One of another model is refused as much as one that is damaged: logged, and done without.
    """
    if cache_dir is None or not (path := cost_model_path(cache_dir, fingerprint)).exists():
        return None
    try:
        cost = CostModel.read(path)
    except DocumentError as error:
        logger.warning("%s; nothing is known about what loading costs", error)
        return None
    if cost.fingerprint != fingerprint:
        logger.warning("%s was measured with another model; it is not used", path)
        return None
    return cost
