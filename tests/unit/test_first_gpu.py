"""benchmarks/gpu/first.py: what it runs, in which order and for how long, and how it continues."""

import json
from pathlib import Path
from types import SimpleNamespace

import first
import pytest
from first import Task, run_part

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


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("part", ["engine", "kernels", "vllm"])
def test_every_task_names_a_program_of_the_repository(part, device):
    for task in first.PARTS[part](SimpleNamespace(device=device, model=None, dataset=None)):
        program = "tests/gpu" if task.command[0] == "-m" else task.command[0]
        assert program in task.command
        assert (Path(first.__file__).parents[2] / program).exists()
        assert "{out}" in task.command
