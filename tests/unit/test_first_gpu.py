"""benchmarks/gpu/first.py: what it runs, in which order and for how long, and how it continues."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path.insert(0, str(SCRIPTS))

import first  # noqa: E402
from first import Task, run_part  # noqa: E402

HEAD = {
    "benchmark": "first-gpu",
    "command": "make first-gpu PART=engine",
    "config": {"part": "engine"},
    "machine": {"gpu": "a GPU", "cpu": "a CPU", "cores": 2},
    "versions": {},
    "commit": "abc",
}
ROWS = "import json, sys; json.dump({'rows': [{'n': 1}], 'complete': %s}, open(sys.argv[1], 'w'))"


def program(text: str, **options) -> Task:
    return Task(options.pop("name", "one"), ("-S", "-c", text, "{out}"), **options)


def run(tmp_path, *tasks: Task, minutes: float = 1.0, head=HEAD) -> dict[str, dict]:
    (tmp_path / "engine").mkdir(exist_ok=True)
    report = run_part(tasks, tmp_path, head, minutes)
    assert json.loads((tmp_path / "engine.json").read_text()) == report
    return {one["task"]: one for one in report["tasks"]} | {"complete": report["complete"]}


def test_a_finished_task_is_not_repeated_and_a_failed_one_comes_last(tmp_path):
    counting = "print('a kernel was compiled'); open('{out}.log', 'a').write('one '); " + ROWS % "True"
    failing = program("print('x'); raise SystemExit('it broke')", name="broken")
    found = run(tmp_path, failing, program(counting), minutes=0.5)
    assert (found["broken"]["state"], found["broken"]["why"]) == ("failed", "it broke")
    assert (found["one"]["state"], found["one"]["rows"]) == ("finished", [{"n": 1}])
    assert not found["complete"]
    order = "open('{out}.order', 'w').write(str(__import__('time').time())); " + ROWS % "True"
    again = run(tmp_path, program(order, name="broken"), program(counting), program(order, name="new"))
    assert again["complete"]
    assert (tmp_path / "engine" / "one.json.log").read_text() == "one "
    broken, new = (float((tmp_path / "engine" / f"{name}.json.order").read_text()) for name in ("broken", "new"))
    assert new < broken
    page = (tmp_path / "engine.md").read_text()
    assert "| one | finished |" in page
    assert "## one\n\n    a kernel was compiled\n\n| n |" in page


def test_other_code_or_another_machine_begins_anew(tmp_path):
    run(tmp_path, program(ROWS % "True"))
    found = run(tmp_path, program("raise SystemExit(2)"), head={**HEAD, "commit": "def"})
    assert (found["one"]["state"], found["one"]["rows"]) == ("failed", [])


def test_a_part_ends_in_time_and_says_what_is_left_out(tmp_path):
    started = time.monotonic()
    slow = ROWS % "False" + "; import time, subprocess; subprocess.run(['sleep', '60'])"
    found = run(tmp_path, program(slow), program(ROWS % "True", name="later"), minutes=0.05)
    assert time.monotonic() - started < 30
    assert (found["one"]["state"], found["one"]["rows"]) == ("interrupted", [{"n": 1}])
    assert found["later"]["state"] == "left out"
    again = run(tmp_path, program(ROWS % "True"), program(ROWS % "True", name="later"))
    assert again["complete"]


def test_a_task_that_gives_no_row_in_its_own_time_has_failed(tmp_path):
    found = run(
        tmp_path, program("import time; time.sleep(60)", most_minutes=0.02), program(ROWS % "True", name="next")
    )
    assert found["one"]["state"] == "failed"
    assert "no row in 1 s" in found["one"]["why"]
    assert found["next"]["state"] == "finished"


def test_what_is_lacking_is_the_reason_of_a_skipped_task(tmp_path):
    found = run(tmp_path, program("raise SystemExit(1)", lacking="vLLM is not installed"))
    assert (found["one"]["state"], found["one"]["why"]) == ("skipped", "vLLM is not installed")
    assert found["complete"]


def test_a_program_gets_its_environment_and_the_paths_at_hand(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/packages")
    saying = ROWS.replace("{'n': 1}", "dict(sys.modules['os'].environ)") % "True"
    row = run(tmp_path, program(f"import os; {saying}", environment={"SOME": "value"}))["one"]["rows"][0]
    assert (row["SOME"], row["PYTHONPATH"]) == ("value", f"{SCRIPTS.parents[1] / 'src'}:/packages")


def arguments(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{"device": "cuda", "model": None, "dataset": None, **changes})


def test_the_part_vllm_has_both_runners_graphs_every_backend_and_the_questions_of_the_data_set(monkeypatch):
    monkeypatch.setattr(first, "find_spec", lambda name: name)
    tasks = {task.name: task for task in first.vllm_tasks(arguments(model="/models/m", dataset="d.json"))}
    assert list(tasks)[:4] == ["v2-graphs-auto", "v1-graphs-auto", "v2-eager-auto", "v1-eager-auto"]
    assert {f"v{runner}-graphs-{backend.lower()}" for runner in (1, 2) for backend in first.BACKENDS} < set(tasks)
    eager, graphs = tasks["v1-eager-auto"], tasks["v2-graphs-flashinfer"]
    assert (eager.environment["VLLM_USE_V2_MODEL_RUNNER"], graphs.environment["VLLM_USE_V2_MODEL_RUNNER"]) == ("0", "1")
    assert ("--compile" in eager.command, "--compile" in graphs.command) == (False, True)
    assert "--dataset" in eager.command
    assert not any(task.lacking for task in tasks.values())


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("part", ["engine", "kernels", "vllm"])
def test_every_task_names_a_program_of_the_repository(part, device):
    for task in first.PARTS[part](arguments(device=device)):
        program = "tests/gpu" if task.command[0] == "-m" else task.command[0]
        assert any(one == program for one in task.command)
        assert (SCRIPTS.parents[1] / program).exists()
        assert "{out}" in task.command


def test_on_a_cpu_only_what_a_cpu_can_do_is_run(monkeypatch):
    monkeypatch.setattr(first, "find_spec", lambda name: name)
    runnable = [task.name for task in first.vllm_tasks(arguments(device="cpu")) if not task.lacking]
    assert runnable == ["v1-eager-auto"]
    assert all("--tiny" in task.command for task in first.kernel_tasks(arguments(device="cpu")))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["engine", "--model", "."], "are for the part vllm"),
        (["vllm", "--dataset", __file__], "name a checkpoint by --model"),
        (["vllm", "--model", "nowhere"], "there is no nowhere"),
        (["vllm", "--model", ".", "--dataset", "nowhere"], "there is no nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(given, reason, capsys, tmp_path):
    with pytest.raises(SystemExit):
        first.main([*given, "--out", str(tmp_path)])
    assert reason in capsys.readouterr().err
