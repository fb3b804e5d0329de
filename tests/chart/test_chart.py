"""The Helm chart, linted and rendered by Helm's own code, and what it renders held against Kubernetes' schemas."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from chunkweave.config import Backend
from chunkweave.errors import UsageError
from chunkweave.settings import parse_duration
from chunkweave_server.settings import resolve

NOT_HERE = "Helm's library is not installed: make test-chart"
helm = pytest.importorskip("helm_python", reason=NOT_HERE)
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason=NOT_HERE)

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART = DEPLOY / "helm" / "chunkweave"
OPERATOR = "monitoring.coreos.com/v1"
VERSIONS = ("1.27", "1.34")
WATCHED = {"serviceMonitor": {"enabled": True}, "rules": {"enabled": True}, "dashboard": {"enabled": True}}
VALUES: dict[str, dict[str, Any]] = {
    "usual": {},
    "engine": {"backend": "engine", "model": "smollm2", "gpus": 0, "replicas": 1, "vllmArgs": []},
    "own remote": {"settings": {"remote_url": "s3://segments"}},
    "alone": {"valkey": {"enabled": False}, "replicas": 1},
    "watched": {"monitoring": WATCHED},
    "all": {
        "image": {"repository": "registry.example/chunkweave-vllm", "tag": "1", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "registry"}],
        "hubTokenSecret": {"name": "hub", "key": "token"},
        "env": [{"name": "OMP_NUM_THREADS", "value": "4"}],
        "storage": {"className": "fast"},
        "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "tls", "annotations": {"a": "b"}},
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {}},
    },
}


def rendered(values: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """Objects by kind and name, as a release `rag` makes them."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="rag", namespace="default")
    objects = [one for name, text in files.items() if name.endswith(".yaml") for one in yaml.safe_load_all(text) if one]
    found = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    assert len(found) == len(objects), "two of one name"
    return found


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_helm_lints_it_and_kubernetes_knows_every_field(values):
    report = helm.lint(CHART, values, strict=True)
    assert report["errors"] == []
    assert [one for one in report["messages"] if one["severity"] > 1] == []
    objects = rendered(values)
    assert ("StatefulSet", "rag-chunkweave") in objects
    for one in objects.values():
        if one["apiVersion"] != OPERATOR:
            for version in VERSIONS:
                kubernetes_validate.validate(one, version, strict=True)


def test_so_it_does_of_the_manifests():
    found = 0
    for file in (DEPLOY / "kubernetes").glob("*.yaml"):
        for one in yaml.safe_load_all(file.read_text(encoding="utf-8")):
            if "kind" in one:  # a kustomization may have none
                found += 1
                for version in VERSIONS:
                    kubernetes_validate.validate(one, version, strict=True)
    assert found > 5


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"backend": "tensorrt"}, "backend"),
        ({"replica": 3}, "replica"),
        ({"replicas": 0}, "replicas"),
        ({"keysSecret": ""}, "keysSecret"),
        ({"monitoring": {"rule": {}}}, "rule"),
    ],
)
def test_values_that_mean_nothing_are_refused(wrong, said):
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError, match=said):
        chart.validate_schema(wrong)


@pytest.mark.parametrize("backend", list(Backend))
def test_the_settings_are_the_servers(tmp_path: Path, backend):
    config = rendered({"backend": str(backend), "settings": {"policy": "gdsf"}})["ConfigMap", "rag-chunkweave"]
    file = tmp_path / "serve.yaml"
    file.write_text(config["data"]["serve.yaml"], encoding="utf-8")
    settings = resolve({}, {}, file, backend=backend).settings
    assert settings.store.policy == "gdsf"
    assert settings.store.remote_url == "redis://rag-chunkweave-valkey:6379/0"
    assert ("Service", "rag-chunkweave-valkey") in rendered({})
    file.write_text("host_bugdet: 4GiB\n", encoding="utf-8")
    with pytest.raises(UsageError, match="host_bugdet"):
        resolve({}, {}, file, backend=backend)


def test_valkey_is_there_for_nobody_but_the_servers():
    objects = rendered({})
    (rule,) = objects["NetworkPolicy", "rag-chunkweave-valkey"]["spec"]["ingress"]
    (allowed,) = (one["podSelector"]["matchLabels"] for one in rule["from"])
    pods = objects["StatefulSet", "rag-chunkweave"]["spec"]["template"]["metadata"]["labels"]
    stored = objects["Deployment", "rag-chunkweave-valkey"]["spec"]["template"]["metadata"]["labels"]
    assert allowed.items() <= pods.items()
    assert not allowed.items() <= stored.items()
    for values in ({"valkey": {"enabled": False}}, {"settings": {"remote_url": "s3://segments"}}):
        assert not [name for _, name in rendered(values) if name.endswith("valkey")]


def test_pods_are_given_time_to_end_answers():
    objects = rendered({})
    graceful = yaml.safe_load(objects["ConfigMap", "rag-chunkweave"]["data"]["serve.yaml"])["graceful"]
    pod = objects["StatefulSet", "rag-chunkweave"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= parse_duration(graceful) + 30


def test_a_change_of_settings_starts_pods_anew():
    def checksum(**settings: str) -> str:
        pod = rendered({"settings": settings})["StatefulSet", "rag-chunkweave"]["spec"]["template"]
        return pod["metadata"]["annotations"]["checksum/settings"]

    assert checksum(policy="lru") == checksum(policy="lru") != checksum(policy="lfu")


def test_board_and_alerts_are_those_of_deploy():
    objects = rendered(VALUES["watched"])
    rules = yaml.safe_load((DEPLOY / "prometheus-rules.yml").read_text(encoding="utf-8"))
    assert objects["PrometheusRule", "rag-chunkweave"]["spec"] == rules
    board = objects["ConfigMap", "rag-chunkweave-dashboard"]
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert yaml.safe_load(board["data"]["chunkweave.json"]) == yaml.safe_load(
        (DEPLOY / "grafana" / "chunkweave.json").read_text(encoding="utf-8")
    )


def test_prometheus_finds_one_service_and_calls_its_job_as_the_alerts_do():
    objects = rendered(VALUES["watched"])
    monitor = objects["ServiceMonitor", "rag-chunkweave"]["spec"]
    labels = {
        name: one["metadata"]["labels"]
        for (kind, name), one in objects.items()
        if kind == "Service" and monitor["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
    }
    assert [labels[name][monitor["jobLabel"]] for name in labels] == ["chunkweave"]
    alerts = (DEPLOY / "prometheus-rules.yml").read_text(encoding="utf-8")
    assert 'up{job="chunkweave"}' in alerts
