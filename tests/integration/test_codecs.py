"""Codecs: round trips, their errors and their edges."""

import pytest
import torch

from chunkweave.errors import UnknownMethodError
from chunkweave.kv.segment import CODECS, Codec, EncodingError, make_codec

QUANTIZED = ("int8", "fp8")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def random_kv(tokens: int = 40, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Channels of very different size, as keys have them."""
    generator = torch.Generator().manual_seed(7)
    sizes = torch.logspace(-3, 2, 2 * 3 * 16)[torch.randperm(96, generator=generator)].view(2, 1, 3, 16)
    return (torch.randn(2, tokens, 3, 16, generator=generator) * sizes).to(dtype)


def relative_l2(codec: Codec, kv: torch.Tensor) -> float:
    decoded = codec.decode_layer(codec.encode_layer(kv), kv.dtype)
    return float((decoded.double() - kv.double()).norm() / kv.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_is_the_identity(dtype: torch.dtype) -> None:
    kv = random_kv(dtype=dtype)
    kv[0, 0, 0, :2] = torch.tensor([torch.inf, torch.nan], dtype=dtype)
    codec = make_codec("raw")
    decoded = codec.decode_layer(codec.encode_layer(kv), dtype)
    assert torch.equal(decoded.view(torch.uint8), kv.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(CODECS))
def test_layout_is_what_is_encoded_and_shape_and_dtype_come_back(name: str, dtype: torch.dtype) -> None:
    codec, kv = make_codec(name), random_kv(5, dtype)
    encoded = codec.encode_layer(kv)
    assert [(t.dtype, tuple(t.shape), t.nbytes) for t in encoded] == [
        (layout.dtype, layout.shape, layout.nbytes) for layout in codec.layout(tuple(kv.shape), dtype)
    ]
    decoded = codec.decode_layer(encoded, dtype)
    assert (decoded.shape, decoded.dtype) == (kv.shape, dtype)


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_error_of_every_channel_is_relative_to_that_channel(name: str) -> None:
    codec, kv = make_codec(name), random_kv()
    decoded = codec.decode_layer(codec.encode_layer(kv), torch.float32)
    greatest = kv.abs().amax(dim=1, keepdim=True)
    # int8: half a step of 1/127 of the greatest. e4m3: half a unit of 3 mantissa bits at the greatest magnitude.
    bound = {"int8": 0.5 / 127, "fp8": 1 / 16}[name]
    assert ((decoded - kv).abs() <= greatest * bound * 1.001).all()
    assert relative_l2(codec, kv) < {"int8": 0.01, "fp8": 0.04}[name]


def test_every_fp8_value_decodes_as_torch_says() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = values[~torch.isnan(values.float())].view(2, 127, 1, 1)
    decoded = make_codec("fp8").decode_layer((torch.ones(2, 1, 1), values), torch.float32)
    assert torch.equal(decoded, values.float())


def test_keys_and_values_have_scales_of_their_own() -> None:
    kv = random_kv()
    kv[0] *= 1e6
    codec = make_codec("int8")
    decoded = codec.decode_layer(codec.encode_layer(kv), torch.float32)
    assert float((decoded[1] - kv[1]).norm() / kv[1].norm()) < 0.01


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("tokens", [1, 2])
def test_zeros_single_tokens_and_denormals(name: str, tokens: int) -> None:
    codec = make_codec(name)
    assert not codec.decode_layer(codec.encode_layer(torch.zeros(2, tokens, 3, 16)), torch.float32).any()
    kv = random_kv(tokens)
    assert relative_l2(codec, kv) < 0.05
    tiny = torch.full((2, tokens, 1, 2), 1e-44)
    decoded = codec.decode_layer(codec.encode_layer(tiny), torch.float32)
    assert torch.isfinite(decoded).all()
    assert (decoded - tiny).abs().max() < 1e-43


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_greatest_of_each_dtype_stays_finite(name: str) -> None:
    codec = make_codec(name)
    for dtype in DTYPES:
        kv = torch.full((2, 3, 1, 2), torch.finfo(dtype).max, dtype=dtype)
        assert torch.isfinite(codec.decode_layer(codec.encode_layer(kv), dtype)).all()


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_has_no_scale_is_refused(name: str, value: float) -> None:
    kv = random_kv()
    kv[1, 2, 1, 3] = value
    with pytest.raises(EncodingError):
        make_codec(name).encode_layer(kv)


def test_unknown_codecs_are_named() -> None:
    with pytest.raises(UnknownMethodError, match="fp8, int8, raw"):
        make_codec("zip")
