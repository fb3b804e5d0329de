"""The environment that vLLM's processes are started in."""

from os import pathsep
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "PYTHONPATH": f"{ROOT}{pathsep}{ROOT / 'src'}",  # workers import the probe, and the sources beside it
}
