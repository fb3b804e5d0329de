"""Orders lists of chunk numbers with ContextPilot, in an environment of its own: JSON in on stdin, JSON out on stdout.

Takes `{"mode": "incremental" or "offline", "requests": [[3, 1, ..], ..]}`. Incremental gives it one request at a time,
as they come; offline all at once, and it says in which order they should be served, too. Needs no chunkweave.
"""

import contextlib
import json
import sys
import time
from io import StringIO


def main() -> None:
    """Read, order, write orders with the seconds that each took."""
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
