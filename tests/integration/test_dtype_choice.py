"""`--dtype auto` on CPUs: the faster of float32 and bfloat16, decided once for a cache folder or a remote."""

import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest
import torch

from chunkweave import Engine, StoreConfig
from chunkweave.models import loading
from chunkweave.models.loading import faster_dtype, load_folder
from chunkweave.store.shared_folder import DTYPE_FILE, read_dtype, write_dtype
from chunkweave.tiers import blobs, remote
from chunkweave.weaving.stores import agreed_dtype
from chunkweave_server.engine_backend import load_engine
from chunkweave_server.settings import resolve
from tests.integration.command_line import succeed
from tests.integration.test_loading import save_checkpoint
from tests.toys import run_at_once, toy_model


def never() -> str:
    pytest.fail("measured again")


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "base"
    toy_model(dtype=torch.bfloat16).model.model.save_pretrained(save_checkpoint(folder))
    return str(folder)


def computed_in(engine: Engine) -> torch.dtype:
    with engine:
        return engine.loaded.model.dtype


def test_a_folder_decides_once_and_for_every_model(checkpoint, tmp_path, monkeypatch):
    store = StoreConfig(cache_dir=tmp_path / "kv")
    for first, then in (("float32", "bfloat16"), ("bfloat16", "float32")):
        (tmp_path / "kv" / DTYPE_FILE).unlink(missing_ok=True)
        for machine in (first, then):
            monkeypatch.setattr(loading, "faster_dtype", lambda machine=machine: machine)
            monkeypatch.setattr("chunkweave.engine.engine.faster_dtype", lambda machine=machine: machine)
            assert computed_in(Engine.load(checkpoint, store=store)) is getattr(torch, first)
        assert computed_in(Engine.load(checkpoint)) is getattr(torch, then)
        assert computed_in(Engine.load(checkpoint, store=store, dtype=then)) is getattr(torch, then)
        assert read_dtype(tmp_path / "kv") == first, "a dtype that was asked for decides nothing"


def test_a_server_takes_the_decision_of_its_folder(checkpoint, tmp_path):
    for decided in ("float32", "bfloat16"):
        (tmp_path / "kv").mkdir(exist_ok=True)
        write_dtype(tmp_path / "kv", decided)
        found = resolve({"model": checkpoint, "cache_dir": str(tmp_path / "kv")}, {})
        assert computed_in(load_engine(found.settings)) is getattr(torch, decided)
    succeed("cache", "stats", tmp_path / "kv")


def test_a_checkpoint_in_float32_is_no_question(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "faster_dtype", never)
    assert load_folder(save_checkpoint(tmp_path / "base")).model.dtype is torch.float32


def test_two_starts_at_once_agree(tmp_path):
    both, dtypes = threading.Barrier(2), []

    def start(number: int) -> None:
        def measured() -> str:
            both.wait(30)
            return ("float32", "bfloat16")[number]

        dtypes.append(agreed_dtype(StoreConfig(cache_dir=tmp_path / "new"), measured))

    run_at_once(2, start)
    assert dtypes == [read_dtype(tmp_path / "new")] * 2


@pytest.mark.parametrize("content", [b"{}", b"\xff", b'{"dtype": "float64"}', b"[]", b"[" * 200_000])
def test_a_decision_that_cannot_be_read_is_made_again(content, tmp_path):
    (tmp_path / DTYPE_FILE).write_bytes(content)
    assert agreed_dtype(StoreConfig(cache_dir=tmp_path), lambda: "float32") == "float32"
    assert read_dtype(tmp_path) == "float32"


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    assert agreed_dtype(StoreConfig(cache_dir=tmp_path / "file"), lambda: "float32") == "float32"
    assert "another start may choose another" in caplog.text


def test_a_remote_decides_for_all_machines(tmp_path, caplog):
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}"
    assert agreed_dtype(StoreConfig(remote_url=url, cache_dir=tmp_path / "a"), lambda: "float32") == "float32"
    write_dtype(tmp_path / "a", "bfloat16")
    for folder in ("a", "b"):
        there = StoreConfig(remote_url=url, cache_dir=tmp_path / folder)
        assert agreed_dtype(there, never) == "float32"
        assert read_dtype(tmp_path / folder) == "float32"
    assert not caplog.text


def test_a_remote_that_refuses_is_asked_for_one_measurement(tmp_path, monkeypatch, caplog):
    full = Mock(**{"name": "full", "expires": False, "get.return_value": None})
    full.put.side_effect = blobs.BlobRefused("read-only")
    monkeypatch.setattr(remote, "open_blobs", lambda url: full)
    measured = iter(["bfloat16"])
    assert agreed_dtype(StoreConfig(remote_url="redis://x"), lambda: next(measured)) == "bfloat16"
    assert "read-only" in caplog.text


def test_a_remote_that_does_not_answer_decides_nothing(tmp_path, monkeypatch, caplog):
    down = Mock(expires=False)
    down.get.side_effect = OSError("no route")
    monkeypatch.setattr(remote, "open_blobs", lambda url: down)
    assert agreed_dtype(StoreConfig(remote_url="redis://x", cache_dir=tmp_path), lambda: "float32") == "float32"
    assert "no route" in caplog.text


PROGRAM = "from chunkweave.models.loading import faster_dtype; print(faster_dtype())"


@pytest.mark.skipif(faster_dtype() != "bfloat16", reason="bfloat16 is not faster here")
def test_instructions_that_are_not_used_do_not_count():
    import os

    narrow = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=narrow, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "float32"
