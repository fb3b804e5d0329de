"""Where calibration records lie, and how they are written and found."""

import json
import logging
import os
from pathlib import Path
from typing import Any

from chunkweave.errors import DocumentError, UsageError
from chunkweave.planning.calibration_record import CalibrationRecord
from chunkweave.planning.method import METHODS

logger = logging.getLogger(__name__)

CALIBRATION_FILE = "chunkweave-calibration.json"
PARTIAL_FILE = "chunkweave-calibration.partial.jsonl"
"""Beside the record while a calibration is not finished."""

_FORMAT = 1


class OtherFormatError(DocumentError):
    """A calibration record of a version of chunkweave that writes them in another way."""


def record_path(cache_dir: Path | None, folder: Path | None, fingerprint: str) -> Path:
    """Where `chunkweave calibrate` writes: into the cache folder if there is one, else beside the model.

    Raises:
        UsageError: there is no place: no cache folder, and a model without a folder that can be written to.
    """
    if cache_dir is not None:
        return cache_dir / fingerprint / CALIBRATION_FILE
    if folder is None:
        raise UsageError("a model without a folder has its record in a cache folder: give --cache-dir")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"the record cannot be written into {folder}: give --cache-dir")
    return folder / CALIBRATION_FILE


def places(cache_dir: Path | None, folder: Path | None, fingerprint: str) -> tuple[Path, ...]:
    """Where a record is looked for, the first one counting: in the cache folder (one's own data), beside the model."""
    own = [] if cache_dir is None else [cache_dir / fingerprint / CALIBRATION_FILE]
    return (*own, *([] if folder is None else [folder / CALIBRATION_FILE]))


def stored_calibration(cache_dir: Path | None, folder: Path | None, fingerprint: str) -> CalibrationRecord | None:
    """The first record found for this model, or None.

    A file that cannot be read, and one that only has records of other models, are logged and passed over.
    """
    for path in places(cache_dir, folder, fingerprint):
        if not path.exists():
            continue
        try:
            records = read_records(path)
        except DocumentError as error:
            logger.warning("%s; it is not used", error)
            continue
        record = next((one for one in records if one.fingerprint == fingerprint), None)
        if record is None:
            others = ", ".join(f"{one.model} in {one.dtype}" for one in records) or "nothing"
            logger.warning("%s is not used: made for other weights or another dtype (%s)", path, others)
        elif unknown := _unknown_methods(record):
            logger.warning("%s is not used: it names methods that this version lacks: %s", path, ", ".join(unknown))
        else:
            return record
    return None


def read_records(path: Path) -> tuple[CalibrationRecord, ...]:
    """Every record of a file: one for each dtype that its model was calibrated in.

    Raises:
        OtherFormatError: another version of chunkweave wrote the file.
        DocumentError: it cannot be read, or holds something else.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT:
            raise OtherFormatError(
                f"{path} is a calibration record of format {data['format']!r}; this version reads {_FORMAT}"
            )
        return tuple(CalibrationRecord.of_dict(record) for record in data["records"])
    except OSError as error:
        raise DocumentError(f"cannot read the calibration record {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DocumentError(
            f"{path} is no calibration record ({type(error).__name__}: {error}); make one with `chunkweave calibrate`"
        ) from error


def save_record(path: Path, record: CalibrationRecord) -> None:
    """Add a record to a file, whole or not at all; it replaces one of the same model or of the same dtype.

    Two dtypes are two fingerprints, and which one a machine computes in depends on its CPU: so a file beside a model
    can hold both. A damaged file is replaced, one of another version is not.

    Raises:
        OtherFormatError: another version of chunkweave wrote the file.
        UsageError: it cannot be written.
    """
    others = existing_records(path)
    kept = [one for one in others if one.fingerprint != record.fingerprint and one.dtype != record.dtype]
    data = {"format": _FORMAT, "records": [one.as_dict() for one in (*kept, record)]}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def existing_records(path: Path) -> tuple[CalibrationRecord, ...]:
    """What a new record will stand beside: nothing where there is no file, or a damaged one, which is logged.

    Raises:
        OtherFormatError: another version of chunkweave wrote the file.
    """
    if not path.exists():
        return ()
    try:
        return read_records(path)
    except OtherFormatError:
        raise
    except DocumentError as error:
        logger.warning("%s; it is replaced", error)
        return ()


def _unknown_methods(record: CalibrationRecord) -> list[str]:
    return [target.method for target in record.targets.values() if target.method and target.method not in METHODS]
