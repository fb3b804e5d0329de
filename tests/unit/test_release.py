"""What is released, and by which targets: extras that are tried, image and chart."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from benchmarks import fresh_installs
from packaging.requirements import Requirement

from chunkweave.vllm.releases import TESTED

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCKERFILES = ("Dockerfile", "Dockerfile.vllm")
TOOL = """#!/bin/sh
[ "$1" = info ] && exit {fails}
echo "{name} $@"
"""


def test_every_extra_is_tried_in_an_environment_of_its_own():
    assert set(fresh_installs.RUNS) == {fresh_installs.BASE, *PROJECT["optional-dependencies"]}


BROUGHT_BY_VLLM = {
    "0.32.0": {
        "fastapi": "0.136.0",
        "numpy": "2.3.5",
        "prometheus-client": "0.25.0",
        "pydantic": "2.13.0",
        "pyyaml": "6.0.3",
        "safetensors": "0.8.0",
        "starlette": "1.10.0",
        "torch": "2.13.0",
        "transformers": "5.19.0",
    },
    "0.33.0": {"torch": "2.14.0", "transformers": "5.20.2"},
}
"""By release of vLLM, versions that it requires exactly or at most, or that were there when it was tested."""


def requirements(*extras: str) -> list[Requirement]:
    named = [*PROJECT["dependencies"], *(one for extra in extras for one in PROJECT["optional-dependencies"][extra])]
    return [one for one in map(Requirement, named) if one.name != "chunkweave"]


@pytest.mark.parametrize("release", BROUGHT_BY_VLLM)
def test_installing_beside_vllm_changes_no_version_of_vllms(release):
    brought = {**BROUGHT_BY_VLLM["0.32.0"], **BROUGHT_BY_VLLM[release]}
    others = {}
    for one in requirements("server", "remote"):
        if one.name in brought:
            assert one.specifier.contains(brought.pop(one.name)), one
        others[one.name] = {each.operator for each in one.specifier}
    assert brought == {}
    assert {name: found for name, found in others.items() if found != {">="}} == {}, "a later vLLM may bring later ones"


@pytest.mark.parametrize("extra", ["gguf", "dev"])
def test_our_own_engine_gets_the_versions_that_it_was_tested_with(extra):
    bounded = {one.name for one in requirements("engine") if {each.operator for each in one.specifier} == {">=", "<"}}
    assert bounded == {"torch", "transformers"}
    named = extras_of(extra)
    assert "engine" in named | {one for each in named for one in extras_of(each)}


def extras_of(extra: str) -> set[str]:
    """The extras of ours that an extra brings."""
    found = map(Requirement, PROJECT["optional-dependencies"][extra])
    return {name for one in found if one.name == "chunkweave" for name in one.extras}


def test_the_extra_for_vllm_takes_the_releases_that_were_tested():
    (vllm,) = [one for one in requirements("vllm") if one.name == "vllm"]
    assert [vllm.specifier.contains(one) for one in (*TESTED, "0.34.0")] == [True, True, False]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"VLLM_NEXT ?= {TESTED[-1]}" in makefile


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_is_built_of_files_and_extras_that_exist(name):
    text = (ROOT / "deploy" / name).read_text(encoding="utf-8")
    copied = [source for line in text.splitlines() if line.startswith("COPY ") for source in line.split()[1:-1]]
    assert "pyproject.toml" in copied
    assert [source for source in copied if not (ROOT / source).exists()] == []
    for extras in re.findall(r"'\.\[([a-z,-]+)\]'", text):
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_compose_builds_and_mounts_what_exists():
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
    built = compose["services"]["chunkweave"]["build"]
    context = ROOT / "deploy" / built["context"]
    assert (context / built["dockerfile"]).is_file()
    mounted = [
        volume.partition(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", ())
        if volume.startswith("./")
    ]
    made_by_users = {"./keys", "./metrics.key"}
    assert made_by_users < set(mounted)
    assert [one for one in mounted if one not in made_by_users and not (ROOT / "deploy" / one).exists()] == []


def test_image_chart_and_package_have_one_version():
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "chunkweave" / "Chart.yaml").read_text(encoding="utf-8"))
    assert {PROJECT["version"], chart["version"], chart["appVersion"]} == {PROJECT["version"]}


def test_values_for_the_production_stack_configure_the_connector():
    values = yaml.safe_load((ROOT / "deploy" / "production-stack.yaml").read_text(encoding="utf-8"))
    for engine in values["servingEngineSpec"]["modelSpec"]:
        flag, config = engine["vllmConfig"]["extraArgs"]
        assert flag == "--kv-transfer-config"
        assert json.loads(config)["kv_connector"] == "ChunkweaveConnector"
        assert engine["tag"] == PROJECT["version"]


def tools(folder: Path, **fails: int) -> dict[str, str]:
    """An environment whose only container tools are these; `info` of each ends with its code."""
    for name, code in fails.items():
        tool = folder / name
        tool.write_text(TOOL.format(name=name, fails=code))
        tool.chmod(0o755)
    return {"PATH": str(folder)}


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_image_takes_the_tool_that_works_and_says_what_is_missing(tmp_path):
    def make(target: str, **fails: int) -> subprocess.CompletedProcess[str]:
        command = [shutil.which("make"), "--silent", target, "IMAGE_ARGS=--pull"]
        return subprocess.run(command, cwd=ROOT, env=tools(tmp_path, **fails), capture_output=True, text=True)

    refused = make("image", docker=1)
    assert refused.returncode != 0
    assert "neither docker nor podman works" in refused.stdout
    assert make("image", docker=1, podman=0).stdout == "podman build --pull -t chunkweave -f deploy/Dockerfile .\n"
    built = make("image-vllm", docker=0, podman=0)
    assert built.stdout == "docker build --pull -t chunkweave-vllm -f deploy/Dockerfile.vllm .\n"
