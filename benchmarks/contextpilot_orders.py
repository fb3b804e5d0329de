"""Orders lists of chunk numbers with ContextPilot, in a separate environment: JSON on stdin, JSON on stdout.

Input: `{"mode": "incremental" or "offline", "requests": [[3, 1, ..], ..]}`. `incremental` passes one request at a time,
`offline` all at once, which also returns a serving order. Does not need chunkweave.
"""

import contextlib
import json
import sys
import time
from io import StringIO


def main() -> None:
    """Read requests, order them, and write orders with their times."""
    from contextpilot import ContextPilot

    job = json.load(sys.stdin)
    pilot = ContextPilot(use_gpu=False)
    requests = job["requests"]
    with contextlib.redirect_stdout(StringIO()):  # it prints while it builds
        if job["mode"] == "offline":
            started = time.perf_counter()
            ordered, served = pilot.reorder([list(request) for request in requests])
            seconds = [(time.perf_counter() - started) / len(requests)] * len(requests)
        else:
            ordered, seconds, served = [], [], list(range(len(requests)))
            for request in requests:
                started = time.perf_counter()
                found, _ = pilot.reorder([list(request)])
                seconds.append(time.perf_counter() - started)
                ordered.append(list(found[0]))
    json.dump({"ordered": [list(map(int, one)) for one in ordered], "served": served, "seconds": seconds}, sys.stdout)


if __name__ == "__main__":
    main()
