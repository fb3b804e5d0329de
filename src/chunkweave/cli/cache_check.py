"""`chunkweave cache check`: reads every byte of a cache directory and compares checksums."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chunkweave.cli import options
from chunkweave.cli.cache_folder import CacheFolder, without_own_files
from chunkweave.cli.cache_tables import problem_dict, problems_table
from chunkweave.cli.console import Output, progress
from chunkweave.cli.option_blocks import with_blocks

if TYPE_CHECKING:
    from chunkweave.tiers.disk import DiskTier
    from chunkweave.tiers.disk_index import ProblemFile
    from chunkweave.tiers.segment_file import DiskSegment

_HARMLESS = ("foreign", "future-version")
"""Not ours, or not ours yet: listed, never touched, and nothing is wrong with the cache."""


@with_blocks
def check(
    cache_dir: options.CacheFolderPath,
    *,
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove corrupt files. What is not a segment of ours stays.")
    ] = False,
    fingerprint: options.Fingerprint = None,
    output: Output,
) -> None:
    """Verify the checksums of every file. Exit code 1 if anything is wrong and not repaired."""
    folder = CacheFolder(cache_dir)
    tiers = list(folder.tiers(fingerprint))
    total = sum(1 for _, tier in tiers for _ in tier.records())
    sound, rows = 0, []
    with progress("checking segments") as report:
        done = 0

        def one_more() -> None:
            nonlocal done
            done += 1
            report(done, total)

        for _, tier in tiers:
            good, problems = _check_tier(tier, one_more, repair=repair)
            sound += good
            rows += [problem_dict(problem, folder.root) | {"repaired": removed} for problem, removed in problems]
    _finish(output, sound, rows)


def _finish(output: Output, sound: int, rows: list[dict[str, Any]]) -> None:
    wrong = [row for row in rows if row["problem"] not in _HARMLESS and not row["repaired"]]
    repaired = sum(row["repaired"] for row in rows)
    summary = f"{sound} segments are sound; {len(wrong)} files are wrong, {repaired} were removed, "
    output.show(*([problems_table(rows)] if rows else []), f"{summary}{len(rows) - len(wrong) - repaired} are not ours")
    output.finish({"sound": sound, "wrong": len(wrong), "repaired": repaired, "problems": rows})
    if wrong:
        raise typer.Exit(1)


def _check_tier(
    tier: "DiskTier", one_more: Callable[[], None], *, repair: bool
) -> tuple[int, list[tuple["ProblemFile", bool]]]:
    """How many segments are sound, and the files that are not, each with whether it was removed."""
    sound, damaged = 0, []
    for record in tier.records():
        source = tier.get(record.id)
        if source is not None:
            problem = _damage(tier, source)
            if problem is None:
                sound += 1
            else:
                damaged.append((problem, repair and _remove(tier, source, problem)))
        one_more()
    known = {problem.path: problem for problem in without_own_files(tier.problems())}
    removed = set(tier.repair()) if repair else set()
    reported = {problem.path for problem, _ in damaged}
    return sound, [*damaged, *((known[path], path in removed) for path in known if path not in reported)]


def _damage(tier: "DiskTier", source: "DiskSegment") -> "ProblemFile | None":
    """What is wrong with a segment's data; None too if its file went or was replaced while it was read."""
    from chunkweave.kv.segment import SegmentLost
    from chunkweave.tiers.disk_index import ProblemFile
    from chunkweave.tiers.segment_header import FileProblem

    try:
        for layer in range(source.header.layout.num_layers):
            source.layer(layer)
    except SegmentLost as lost:
        if not _is_still(tier, source):
            return None
        # What the system would not read may be sound: no reason to remove it.
        unread = isinstance(lost.__cause__, OSError)
        return ProblemFile(source.path, FileProblem.UNREADABLE if unread else FileProblem.CORRUPT, str(lost))
    return None


def _remove(tier: "DiskTier", source: "DiskSegment", problem: "ProblemFile") -> bool:
    if problem.problem.value != "corrupt" or not _is_still(tier, source):
        return False
    tier.delete(source.header.record.id)
    return not source.path.exists()


def _is_still(tier: "DiskTier", source: "DiskSegment") -> bool:
    """Whether the file is the one that was read, not a new one of the same name."""
    current = tier.get(source.header.record.id)
    return current is not None and current.header is source.header
