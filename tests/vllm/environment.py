"""The environment that vLLM's processes are started in."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

RUNNER_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
"""Whether vLLM's Model Runner V2 runs these tests: `make test-vllm-v2`."""

_START_UP = Path(__file__).parent / ("runner_v2" if RUNNER_V2 else "forking")
"""The folder of the `sitecustomize` of vLLM's processes."""

_FOLDERS = [str(ROOT), str(ROOT / "src"), str(_START_UP)]

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "PYTHONPATH": os.pathsep.join(_FOLDERS),  # workers import the probe, and the sources beside it
}
