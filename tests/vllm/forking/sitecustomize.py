"""Makes vLLM's processes fork, which takes half of a server's start: on a CPU vLLM would spawn them.

Python imports this module at start-up if its folder is in PYTHONPATH. Tests run with one OpenMP thread, so a fork loses
no pool of threads. `CHUNKWEAVE_TESTS_SPAWN=1` leaves vLLM's own way.
"""

import multiprocessing.context as processes
import os

if os.environ.get("CHUNKWEAVE_TESTS_SPAWN") != "1":
    processes._concrete_contexts["spawn"] = processes._concrete_contexts["fork"]
