"""Makes vLLM's processes fork, which takes half of a server's start: on a CPU vLLM would spawn them.

Python imports this module at start-up if its folder is in PYTHONPATH. With one OpenMP thread there is nothing that a
fork could break. `CHUNKWEAVE_TESTS_SPAWN=1` leaves vLLM's own way.
"""

import multiprocessing.context as processes
import os

if os.environ.get("CHUNKWEAVE_TESTS_SPAWN") != "1":
    processes._concrete_contexts["spawn"] = processes._concrete_contexts["fork"]
