"""Writers of a corpus that are killed: every change that had returned is there, and nothing is half there."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.unit.retrieval_fakes import new_corpus, opened

ROOT = Path(__file__).resolve().parents[2]
RUNS = int(os.environ.get("CHUNKWEAVE_FAULT_RUNS", "12"))


def test_killed_writers_lose_nothing_that_was_committed(tmp_path):
    new_corpus(tmp_path)
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.integration.corpus_writer", str(tmp_path)]
    known: dict[str, str | None] = {}
    changes = 0
    draw = random.Random(7)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT) as host:
        assert host.stdin is not None
        assert host.stdout is not None
        for run in range(RUNS):
            host.stdin.write(f"{run}\n")
            host.stdin.flush()
            pid, unsure = None, set()
            told = iter(host.stdout.readline, "dead\n")
            for line in told:
                word, *rest = line.split()
                if word == "pid":
                    pid = int(rest[0])
                    time.sleep(draw.uniform(0.05, 0.5))
                    os.kill(pid, signal.SIGKILL)
                    host.stdin.write("wait\n")
                    host.stdin.flush()
                elif word == "maybe":
                    unsure.add(rest[0])
                else:
                    unsure.discard(rest[0])
                    known[rest[0]] = rest[1] if word == "have" else None
                    changes += 1
            corpus = opened(tmp_path)
            for one, digest in known.items():
                held = corpus.document(one).digest if one in corpus else None
                assert held == digest or one in unsure, (run, one)
            known = {one.id: one.digest for one in corpus.documents}
            if len(corpus):
                assert len(corpus.search("storm", len(corpus))) == len(corpus)
        host.stdin.close()
    assert changes > 2 * RUNS, "writers were killed before they changed anything"
    corpus = opened(tmp_path)
    corpus.remove([one.id for one in corpus.documents])
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.sqlite"]
