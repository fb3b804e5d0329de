"""Settings from a file, the environment and flags: one precedence, and nothing secret shown."""

import json
from enum import StrEnum
from pathlib import Path

import pytest
import torch

from chunkweave.config import Backend
from chunkweave.errors import UsageError
from chunkweave.settings import settings_of as declared_in
from chunkweave_server.engine_backend import load_engine
from chunkweave_server.settings import GROUPS, resolve, server_settings, unused_variables
from tests.integration.command_line import invoke

TOML = 'model = "reader"\nport = 9001\nmax_body = "1MB"\ncorpus = ["a", "b=c"]\ndeadline = 5\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.toml"
    path.write_text(TOML)
    return path


def test_a_flag_that_is_none_wins_over_a_value_and_a_default():
    settings = resolve({"max_variants": None, "deadline": None}, {"CHUNKWEAVE_MAX_VARIANTS": "3"}).settings
    assert settings.store.max_variants is settings.batching.deadline_s is None
    with pytest.raises(UsageError, match="port"):
        resolve({"port": None}, {})


def test_flags_win_over_environment_over_file_over_defaults(file: Path):
    environment = {"CHUNKWEAVE_PORT": "9002", "CHUNKWEAVE_MAX_NUM_SEQS": "3", "CHUNKWEAVE_HOST": "::1"}
    resolved = resolve({"host": "localhost"}, environment, file)
    settings, origins = resolved.settings, resolved.origins
    assert (settings.listen.host, origins["host"]) == ("localhost", "command line")
    assert (settings.listen.port, origins["port"]) == (9002, "CHUNKWEAVE_PORT")
    assert (settings.batching.max_running, origins["max_num_seqs"]) == (3, "CHUNKWEAVE_MAX_NUM_SEQS")
    assert (settings.model.model, origins["model"]) == ("reader", str(file))
    assert (settings.corpora.corpus, settings.batching.deadline_s) == (("a", "b=c"), 5.0)
    assert (settings.limits.max_concurrent, origins["max_concurrent"]) == (64, "default")


_ANYTHING = {"requests_per_minute": 2.0}


@pytest.mark.parametrize("backend", list(Backend))
def test_every_setting_can_be_said_in_every_way(tmp_path: Path, backend: Backend):
    groups = {name: group for group, kind in GROUPS.items() for name in declared_in(kind)}
    for name, one in server_settings(backend).items():
        default = one.default
        default = default if default is not None else _ANYTHING.get(name)
        if default is None or isinstance(default, bool | StrEnum) or default == () or name == "backend":
            continue
        raised = isinstance(default, int | float) and name != "device_budget"
        value = default + 1 if raised else default
        text = one.text(value)
        path = tmp_path / "one.yaml"
        path.write_text(f"{name}: {json.dumps(list(value) if isinstance(value, tuple) else value)}\n")
        sources = (({}, {f"CHUNKWEAVE_{name.upper()}": text}, None), ({name: value}, {}, None), ({}, {}, path))
        for flags, environment, file in sources:
            settings = resolve(flags, environment, file, backend=backend).settings
            assert getattr(getattr(settings, groups[name]), one.attribute) == value, name
        assert one.meaning.endswith((".", "..."))


def test_yaml_says_the_same_as_toml(tmp_path: Path, file: Path):
    yaml = tmp_path / "serve.yaml"
    yaml.write_text("model: reader\nport: 9001\nmax_body: 1MB\ncorpus: [a, b=c]\ndeadline: 5\n")
    assert resolve({}, {}, yaml).settings == resolve({}, {}, file).settings
    assert resolve({}, {"CHUNKWEAVE_CONFIG": str(yaml)}).settings.listen.port == 9001


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "prot"),
        ('port = "x"', "port"),
        ("port = true", "port"),
        ("port = 70000", "65535"),
        ('max_body = "much"', "size"),
        ("max_concurrent = 0", "max_concurrent"),
        ("requests_per_minute = -1", "requests_per_minute"),
        ("kv_tokens = 1", "cannot hold one block"),
        ("corpus = [1]", "corpus"),
        ("allow_anonymous = 1", "allow_anonymous"),
        ('model = "a"\nshape = "b"', "either"),
        ("ttl_s = 5", "did you mean ttl"),
        ("graceful = 0", "graceful"),
        ("[table]", "table"),
        ("= 1", "TOML"),
    ],
)
def test_wrong_files_are_refused_with_what_is_wrong(tmp_path: Path, text: str, words: str):
    path = tmp_path / "serve.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        resolve({}, {}, path)


def test_wrong_sources_are_refused(tmp_path: Path):
    for name, text in (("a.yaml", "- 1"), ("b.yaml", "{")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError):
            resolve({}, {}, tmp_path / name)
    with pytest.raises(UsageError, match="cannot be read"):
        resolve({}, {}, tmp_path / "none.toml")
    with pytest.raises(UsageError, match="CHUNKWEAVE_PORT"):
        resolve({}, {"CHUNKWEAVE_PORT": "many"})
    with pytest.raises(UsageError, match="ALLOW"):
        resolve({}, {"CHUNKWEAVE_ALLOW_ANONYMOUS": "perhaps"})


def test_misspelt_variables_are_found():
    environment = {"CHUNKWEAVE_PROT": "1", "CHUNKWEAVE_PORT": "1", "CHUNKWEAVE_API_KEYS": "x", "PATH": "/"}
    assert unused_variables(environment) == ["CHUNKWEAVE_PROT (did you mean CHUNKWEAVE_PORT?)"]
    assert unused_variables({"CHUNKWEAVE_COLOUR": "red"}) == ["CHUNKWEAVE_COLOUR"]


def test_misspelt_names_are_refused_with_the_setting_that_is_close(tmp_path: Path):
    file = tmp_path / "serve.toml"
    file.write_text('prot = 1\nhost_bugdet = 1\ncolour = "red"\n')
    close = r"colour, host_bugdet \(did you mean host_budget\?\), prot \(did you mean port\?\); `chunkweave config"
    with pytest.raises(UsageError, match=close) as refused_file:
        resolve({}, {}, file)
    assert len(str(refused_file.value)) < 300, "not a list of all settings"
    refused = invoke("serve", "--shape", "demo", "--prot=1")
    assert (refused.exit_code, "no such option: --prot (did you mean --port?)" in refused.output) == (2, True)
    shown = invoke("config", "show", "--prot", "1")
    assert (shown.exit_code, "--port" in shown.output) == (2, True)


def test_config_show_masks_secrets(monkeypatch, file: Path):
    monkeypatch.setenv("CHUNKWEAVE_REMOTE_URL", "redis://user:hunter2@cache:6379/0?password=hunter3")
    monkeypatch.setenv("CHUNKWEAVE_API_KEYS", "acme=hunter4-hunter4-hunter4-hunter4")
    result = invoke("config", "show", "--config", file, "--max-documents", "7")
    assert result.exit_code == 0, result.output
    assert "hunter" not in result.output
    data = json.loads(invoke("config", "show", "--config", file, "--json").stdout)
    rows = {row["name"]: row for row in data["settings"]}
    assert "hunter" not in json.dumps(data)
    assert rows["remote_url"]["origin"] == "CHUNKWEAVE_REMOTE_URL"
    assert rows["api_keys"]["value"] == "***"
    assert rows["port"] == {"name": "port", "value": 9001, "origin": str(file), "meaning": rows["port"]["meaning"]}


def test_serve_refuses_before_it_loads(monkeypatch):
    monkeypatch.delenv("CHUNKWEAVE_MODEL", raising=False)
    assert invoke("serve").exit_code == 2
    open_to_all = invoke("serve", "--shape", "demo", "--host", "0.0.0.0")
    assert (open_to_all.exit_code, "API keys" in open_to_all.output) == (2, True)


def test_keys_new_shows_a_key_once(tmp_path: Path):
    file = tmp_path / "keys"
    told = json.loads(invoke("keys", "new", "acme", "--file", file, "--json").stdout)
    assert told["key"] not in file.read_text()
    assert file.read_text() == told["line"] + "\n"
    assert invoke("keys", "new", "a/b").exit_code == 2


def test_threads_are_those_of_the_engine_and_refused_for_vllm():
    before = torch.get_num_threads()
    try:
        load_engine(resolve({"shape": "demo", "threads": 2}, {}).settings).close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    with pytest.raises(UsageError, match=r"threads is a setting of the other .*OMP_NUM_THREADS"):
        resolve({"threads": 2, "backend": "vllm"}, {})
    refused = invoke("vllm-serve", "smollm2", "--upstream", "http://127.0.0.1:9", "--threads", "2")
    assert (refused.exit_code, "set OMP_NUM_THREADS" in refused.output) == (2, True)
