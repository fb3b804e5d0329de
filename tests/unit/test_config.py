"""Configurations are checked when they are made; "auto" is resolved by pure functions."""

import pytest

from chunkweave.config import ReuseConfig, SamplingParams, StoreConfig, resolve_device, resolve_dtype
from chunkweave.errors import UsageError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ReuseConfig(recompute_ratio=-0.1), "between 0 and 1"),
        (lambda: ReuseConfig(check_layers=()), "check_layers"),
        (lambda: ReuseConfig(check_layers=(0, 1)), "layer 0 cannot deviate"),
        (lambda: ReuseConfig(check_layers=(2, 2)), "ascending"),
        (lambda: ReuseConfig(alpha=-0.5), "alpha"),
        (lambda: ReuseConfig(alpha=float("nan")), "alpha"),
        (lambda: ReuseConfig(alpha=float("inf")), "alpha"),
        (lambda: StoreConfig(max_variants=0), "at least 1"),
        (lambda: StoreConfig(max_instances=-1), "negative"),
        (lambda: StoreConfig(host_budget_bytes=-1), "negative"),
        (lambda: StoreConfig(ttl_s=0.0), "positive"),
        (lambda: StoreConfig(remote_url="localhost"), "URL"),
        (lambda: SamplingParams(max_new_tokens=0), "at least 1"),
        (lambda: SamplingParams(temperature=float("nan")), "temperature"),
        (lambda: SamplingParams(top_p=1.1), "top_p"),
        (lambda: SamplingParams(stop=("",)), "stop"),
    ],
)
def test_bad_values_say_what_is_allowed(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_devices():
    assert resolve_device("auto", cuda_available=True) == "cuda"
    assert resolve_device("auto", cuda_available=False) == "cpu"
    assert resolve_device("cuda:1", cuda_available=True) == "cuda:1"
    with pytest.raises(UsageError, match="no CUDA GPU"):
        resolve_device("cuda", cuda_available=False)


@pytest.mark.parametrize(
    ("dtype", "device", "checkpoint", "fast", "resolved"),
    [
        ("auto", "cuda", "float16", False, "float16"),
        ("auto", "cpu", "float16", True, "bfloat16"),
        ("auto", "cpu", "bfloat16", False, "float32"),
        ("auto", "cpu", "float32", True, "float32"),
        ("bf16", "cpu", "float32", False, "bfloat16"),
        ("float32", "cuda", "bfloat16", True, "float32"),
    ],
)
def test_types(dtype, device, checkpoint, fast, resolved):
    assert resolve_dtype(dtype, device=device, checkpoint=checkpoint, fast_bf16=fast) == resolved


@pytest.mark.parametrize(("dtype", "message"), [("int8", "unknown dtype"), ("fp16", "not supported on a CPU")])
def test_types_that_do_not_go(dtype, message):
    with pytest.raises(UsageError, match=message):
        resolve_dtype(dtype, device="cpu", checkpoint="float32", fast_bf16=True)
