"""A process that forks writers to be killed: `python -m tests.integration.crash_writer`.

It loads torch once. For every line `root writer seed codec operations` on stdin it forks a writer and answers `pid N`;
`wait` reaps all writers and answers `dead`. A writer reports on the same pipe, one atomic line each: `p N` once the
put of segment N has returned, `d N` before it deletes N. Operations 0 means: until killed.

Of 30 segments, writer k (0 or 1) puts and deletes those with N % 3 == k; both put those with N % 3 == 2.
"""

import os
import random
import sys
from pathlib import Path

import torch

from chunkweave.kv.segment import SegmentKV
from chunkweave.store.records import SegmentRecord
from chunkweave.tiers.disk import DiskTier

from .segments import FINGERPRINT, make_segment

SEGMENTS = 30
LAYERS = 8


def crash_segment(number: int) -> tuple[SegmentRecord, SegmentKV]:
    return make_segment(number, layers=LAYERS, tokens=16 + 8 * number, head_dim=32)


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def write(root: Path, writer: int, seed: int, codec: str, operations: int) -> None:
    pool = {number: crash_segment(number) for number in range(SEGMENTS) if number % 3 in (writer, 2)}
    draw = random.Random(seed)
    tier = DiskTier(root, FINGERPRINT, codec=codec)
    done = 0
    while operations == 0 or done < operations:
        number = draw.choice(sorted(pool))
        if number % 3 != 2 and draw.random() < 0.2:
            say(f"d {number}")
            tier.delete(pool[number][0].id)
        else:
            tier.put(*pool[number])
            say(f"p {number}")
        done += 1


def serve() -> None:
    torch.set_num_threads(1)
    crash_segment(0)
    children: list[int] = []
    for line in sys.stdin:
        if line.strip() == "wait":
            for child in children:
                os.waitpid(child, 0)
            children.clear()
            say("dead")
            continue
        root, *numbers = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            writer, seed, codec, operations = numbers
            write(Path(root), int(writer), int(seed), codec, int(operations))
            os._exit(0)
        children.append(child)
        say(f"pid {child}")


if __name__ == "__main__":
    serve()
