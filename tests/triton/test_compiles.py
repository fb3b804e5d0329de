"""What Triton's compiler makes of the kernel for GPUs that are not here; `make compile-matrix` does it for all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MATRIX = HERE.parents[1] / "benchmarks" / "gpu" / "compile_matrix.py"


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script where Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def matrix(tmp_path, *arguments: str) -> list[dict]:
    out = tmp_path / "matrix.json"
    run(MATRIX, "--dims", "128", "--dtypes", "bfloat16", "--out", str(out), *arguments)
    return json.loads(out.read_text())["rows"]


def test_what_requests_need_is_compiled_at_start_and_is_little():
    """Triton's own keys: positions that begin anywhere, windows, hidden keys, parts, splits, numbers of requests."""
    for at_start, prefill, decoding, missing in json.loads(run(HERE / "compiler.py", "keys").stdout):
        assert not missing
        assert 6 <= prefill <= at_start <= 16
        assert 2 <= decoding <= 4


def test_a_kernel_that_compiles_while_serving_is_counted_and_logged(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = run(HERE / "compiler.py", "stalls")
    assert json.loads(done.stdout) == [0, 0, 1]
    assert "compiled after start-up" in done.stderr
    assert "('constexpr', 64)" in done.stderr


@pytest.mark.slow
def test_every_kernel_fits_the_least_shared_memory_and_loads_ahead(tmp_path):
    """An L40S's, with parts, too. Without the hint on the keys' alignment, every element would be loaded by itself."""
    rows = matrix(tmp_path, "--archs", "89")
    assert {row["parts"] for row in rows} == {0, 32, 64, 256}
    for row in rows:
        assert row["shared_kib"] <= 99
        assert row["products"] >= 16
        assert row["ahead"] >= 20


@pytest.mark.slow
def test_it_uses_hoppers_matrix_units(tmp_path):
    (row,) = matrix(tmp_path, "--archs", "90", "--parts", "32")
    assert row["products"] >= 16
    assert row["ahead"] >= 30
