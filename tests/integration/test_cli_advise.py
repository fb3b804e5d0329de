"""`chunkweave advise`: the cheapest device that adds no delay, from a file and a table."""

import json

import pytest

from chunkweave.planning.cost import CostModel
from tests.integration.command_line import invoke


@pytest.fixture
def cost(tmp_path):
    path = tmp_path / "cost.json"
    CostModel((0,), (1000,), ((2.0,),), 1_000_000).save(path)  # 1000 tokens: 2 s to compute, 1 GB to load
    return path


def advise(*arguments) -> tuple[int, str, str]:
    result = invoke("advise", *arguments)
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


DEVICES = ("--device", "ram,50GB,0.01", "--device", "ssd,4GB,0.0002", "--device", "hdd,200MB,0.00004")


@pytest.mark.parametrize(("ratio", "chosen"), [(0.15, "ssd"), (0.01, "ram"), (1.0, "ssd")])
def test_the_cheapest_device_that_adds_no_delay_is_chosen(cost, ratio, chosen):
    code, stdout, _ = advise(cost, *DEVICES, "--tokens", 1000, "--recompute-ratio", ratio, "--json")
    assert code == 0
    data = json.loads(stdout)
    assert data["chosen"] == chosen
    by_name = {row["device"]: row for row in data["devices"]}
    assert by_name["hdd"]["load_s"] == pytest.approx(5.0)
    assert by_name["hdd"]["ratio_that_hides"] == 1.0
    assert by_name["ssd"]["recompute_s"] == pytest.approx(2 * ratio)


def test_the_table_marks_it(cost):
    code, stdout, _ = advise(cost, *DEVICES, "--tokens", 1000)
    assert code == 0
    assert [line for line in stdout.splitlines() if "<--" in line and "ssd" in line]


@pytest.mark.parametrize(
    ("device", "code", "said"),
    [
        ("ssd", 2, "NAME,THROUGHPUT,PRICE"),
        ("ssd,fast,1", 2, "fast"),
        ("ssd,0,1", 2, "positive throughput"),
        ("ssd,1GB,cheap", 2, "NAME,THROUGHPUT,PRICE"),
    ],
)
def test_a_device_that_is_none(cost, device, code, said):
    found, _, stderr = advise(cost, "--device", device)
    assert found == code
    assert said in stderr


def test_a_file_that_is_no_cost_model(tmp_path):
    code, _, stderr = advise(tmp_path / "none.json", *DEVICES)
    assert code == 1
    assert "chunkweave profile" in stderr
