"""The decision side, and the server with its vLLM backend, import where torch and transformers are not installed."""

import os
import subprocess
import sys

SCRIPT = """
import importlib, importlib.abc, pkgutil, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"{name} is not installed here")
        return None

sys.meta_path.insert(0, Refuse())
importlib.import_module("chunkweave.store.tier_store")
importlib.import_module("chunkweave.tiers.host")
importlib.import_module("chunkweave.retrieval.corpus")
importlib.import_module("chunkweave.retrieval.speculation")
importlib.import_module("chunkweave_server.app")
importlib.import_module("chunkweave_server.vllm_backend.backend")
importlib.import_module("chunkweave.engine.request_state")
importlib.import_module("chunkweave.engine.scheduler")
for folder in ("prompt", "store", "planning", "conversation"):
    package = importlib.import_module(f"chunkweave.{folder}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
assert "torch" not in sys.modules and "transformers" not in sys.modules
print("imported")
"""


def test_decision_folders_import_without_torch_and_transformers() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "imported"
