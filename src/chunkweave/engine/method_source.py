"""What an engine's reuse methods come from: its owner's method_request, and the model's calibration record."""

import logging
from pathlib import Path

from chunkweave.config import ReuseConfig
from chunkweave.errors import UsageError
from chunkweave.models.loading import LoadedModel
from chunkweave.planning.calibration import CalibrationRecord, Quality, stored_calibration
from chunkweave.planning.method import make_method
from chunkweave.planning.method_choice import MethodChooser, MethodRequest, Why

logger = logging.getLogger(__name__)


def open_chooser(
    loaded: LoadedModel,
    method_request: MethodRequest,
    reuse: ReuseConfig,
    *,
    calibration: CalibrationRecord | None,
    cache_dir: Path | None,
) -> MethodChooser:
    """What chooses the method of each request for a model; `method_request` is for those that name nothing.

    Args:
        loaded: the model.
        method_request: what the engine's owner asked for.
        reuse: what a method that is named is told.
        calibration: the record that quality targets resolve by; None = the one in `cache_dir` or beside the model.
        cache_dir: the folder that the engine keeps segments in, if it has one.

    Raises:
        UnknownMethodError: no such method.
        UsageError: a record of another model, or a quality target without a record; the message says how to make one.
    """
    record = calibration or stored_calibration(cache_dir, loaded.folder, loaded.fingerprint)
    if record is not None and record.fingerprint != loaded.fingerprint:
        raise UsageError(f"the calibration record is that of {record.model}, not of {loaded.name}")
    chooser = MethodChooser(method_request, reuse, record, _how_to_calibrate(loaded))
    usual = chooser.choose(MethodRequest())
    make_method(usual.method, usual.reuse)
    if record is None and usual.why is Why.EXACT:
        logger.info(
            "only exact prefixes are reused unless a method is named; `%s` finds out what more is safe",
            chooser.how_to_calibrate,
        )
    return chooser


def refuse_unknown(method: str | None, quality: str | None) -> None:
    """Before a model is loaded for nothing.

    Raises:
        UnknownMethodError: no such method.
        UsageError: no such quality.
    """
    if method is not None:
        make_method(method)
    if quality is not None:
        Quality.parse(quality)


def _how_to_calibrate(loaded: LoadedModel) -> str:
    where = f"--shape {loaded.name} --cache-dir DIR" if loaded.folder is None else str(loaded.folder)
    return f"chunkweave calibrate {where}"
