"""The format: what the safetensors library sees, one read a layer, and everything that is refused."""

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from chunkweave.errors import UsageError
from chunkweave.kv.segment import CODECS, SegmentKV, SegmentLost, SegmentSource, make_codec
from chunkweave.store.records import ANYTHING, AttentionProfile, SegmentRecord
from chunkweave.tiers import segment_file, segment_header
from chunkweave.tiers.segment_file import (
    MemorySegment,
    encode_segment,
    file_bytes,
    read_header,
    write_segment,
)
from chunkweave.tiers.segment_header import FileProblem, SegmentRefused, header_bytes, parse_header
from tests.toys import run_at_once

from .segments import FINGERPRINT, files_under, layers_of, make_segment, open_segment

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def head(codec: str = "raw") -> dict[str, Any]:
    return {"codec": make_codec(codec), "fingerprint": FINGERPRINT, "created_s": 1234.5}


def put(folder: Path, record: SegmentRecord, kv: SegmentSource, codec: str = "raw") -> Path:
    path = folder / f"{record.id}.safetensors"
    write_segment(path, record, kv, **head(codec))
    return path


def write(folder: Path, number: int = 1, codec: str = "raw", **shape) -> tuple[Path, SegmentRecord, SegmentKV]:
    record, kv = make_segment(number, **shape)
    return put(folder, record, kv, codec), record, kv


def refusal(path: Path) -> FileProblem:
    with pytest.raises(SegmentRefused) as refused:
        open_segment(path)
    return refused.value.problem


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_read(tmp_path: Path, codec: str, dtype: torch.dtype) -> None:
    path, record, kv = write(tmp_path, codec=codec, dtype=dtype)
    source = open_segment(path)
    assert source.header.record == replace(record, nbytes=path.stat().st_size) == read_header(path).record
    assert (source.header.created_s, source.header.fingerprint) == (1234.5, FINGERPRINT)
    assert (source.tokens, source.nbytes) == (kv.tokens, kv.nbytes)
    one = make_codec(codec)
    expected = torch.stack([one.decode_layer(one.encode_layer(kv.layer(i)), dtype) for i in range(3)])
    assert torch.equal(layers_of(source), expected)
    assert codec != "raw" or torch.equal(expected, kv.kv)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_bytes_of_a_quantized_cache_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    path, _, kv = write(tmp_path, dtype=dtype)
    source = open_segment(path)
    assert source.header.layout.dtype == dtype
    assert torch.equal(layers_of(source).view(torch.uint8), kv.kv.view(torch.uint8))


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_keys_that_are_rotated_say_where_to(tmp_path: Path, codec: str) -> None:
    record, kv = make_segment(1)
    rotated = SegmentKV(kv.kv, keys_at=700)
    path = tmp_path / f"{record.id}.safetensors"
    written = write_segment(path, record, rotated, **head(codec))
    assert path.stat().st_size == file_bytes(record, rotated, make_codec(codec), FINGERPRINT)
    assert written.layout.keys_at == open_segment(path).keys_at == 700
    whole = encode_segment(record, rotated, **head(codec))
    assert whole == path.read_bytes()
    assert MemorySegment(whole).keys_at == 700
    assert open_segment(put(tmp_path, record, kv, codec)).keys_at is None


def with_profile(record: SegmentRecord, **changes) -> SegmentRecord:
    """A record with a profile of masses that float32 holds, on two chunks of which one stood there twice."""
    first, second = record.context
    n = len(record.token_ids)
    profile = AttentionProfile(
        chunks=(first, second, first),
        lengths=(5, 7, 5),
        inter=(0.1, 1 / 3, 2.5e-9),
        intra=1.7,
        sink=0.2,
        outward=tuple(i / 8 for i in range(n)),
    )
    return replace(record, attention=replace(profile, **changes))


def header_of(record: SegmentRecord, kv: SegmentKV, edit=None) -> bytes:
    """The header of `record`; `edit` may change its metadata behind the checksum's back."""
    layout = segment_header.SegmentLayout(tuple(kv.kv.shape), kv.kv.dtype, make_codec("raw"))
    whole = header_bytes(record, FINGERPRINT, layout, 1.0, (0,) * 3)
    if edit is None:
        return whole
    fields = json.loads(whole[8:])
    edit(fields["__metadata__"])
    fields["__metadata__"]["checksum"] = "0" * 32
    text = json.dumps(fields, separators=(",", ":")).encode()
    blank = len(text).to_bytes(8, "little") + text
    return blank.replace(b"0" * 32, segment_header._checksum(blank), 1)


def parsed(whole: bytes, kv: SegmentKV) -> SegmentRecord:
    return parse_header(whole, len(whole) + kv.nbytes).record


def test_the_generation_comes_back_and_a_file_without_one_is_of_generation_0() -> None:
    plain, kv = make_segment(2)
    woven = replace(plain, generation=3)
    assert parsed(header_of(woven, kv), kv).generation == 3
    assert parsed(header_of(woven, kv, lambda fields: fields.pop("generation")), kv).generation == 0
    for wrong in ("-1", "many"):
        with pytest.raises(SegmentRefused):
            parsed(header_of(woven, kv, lambda fields, wrong=wrong: fields.update(generation=wrong)), kv)
    with pytest.raises(ValueError, match="exact segment of generation 1"):
        replace(plain, exact=True, generation=1)


def mean_record(**changes) -> tuple[SegmentRecord, SegmentKV]:
    """A mean over two contexts, one of them empty, that was woven from what another chunk went into."""
    plain, kv = make_segment(2, contexts=2)
    contexts = [plain.context, ()]
    attention = with_profile(plain).attention
    other = make_segment(3)[0].chunk_id
    mean = plain.mean_over(contexts, nbytes=kv.nbytes, attention=attention, read=[*plain.context, other])
    assert (mean.contexts, mean.read) == (((), plain.context), (other,))
    return replace(mean, **changes), kv


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_mean_says_over_what_it_is_and_what_else_was_read(tmp_path: Path, codec: str) -> None:
    record, kv = mean_record()
    path = put(tmp_path, record, kv, codec)
    assert file_bytes(record, kv, make_codec(codec), FINGERPRINT) == path.stat().st_size
    assert read_header(path).record == replace(record, nbytes=path.stat().st_size)
    assert read_header(path).record.sources == record.sources
    assert MemorySegment(encode_segment(record, kv, **head(codec))).header.record.contexts == record.contexts


def test_what_has_read_more_than_its_context_says_so() -> None:
    plain, kv = make_segment(2)
    record = replace(plain, read=(make_segment(3)[0].chunk_id, ANYTHING))
    assert parsed(header_of(record, kv), kv).read == record.read


def test_fields_that_a_record_lacks_are_not_written() -> None:
    plain, kv = make_segment(2)
    whole = header_of(plain, kv)
    for name in (b"contexts", b"read", b"keys_at", b"generation", b"attention"):
        assert name not in whole
    assert parsed(whole, kv).attention is None


def refused_as_corrupt(record: SegmentRecord, kv: SegmentKV, edit) -> None:
    """A header that is believed as it is, and contradicts itself when it is edited."""
    unchanged = parsed(header_of(record, kv, lambda fields: None), kv)
    assert (unchanged.contexts, unchanged.attention) == (record.contexts, record.attention)
    with pytest.raises(SegmentRefused, match="contradicts itself") as refused:
        parsed(header_of(record, kv, edit), kv)
    assert refused.value.problem is FileProblem.CORRUPT


@pytest.mark.parametrize(
    "edit",
    [
        lambda fields: fields.pop("contexts"),
        lambda fields: fields.update(contexts=""),
        lambda fields: fields.update(contexts=fields["contexts"] + "|"),
        lambda fields: fields.update(contexts=fields["contexts"].replace("|", " ")),
        lambda fields: fields.update(contexts=fields["contexts"][:-1]),
        lambda fields: fields.update(contexts="|" + "../" * 10 + "ab"),
        lambda fields: fields.update(contexts="|" + "f" * 32),
        lambda fields: fields.update(context=fields["contexts"].strip("|")),
        lambda fields: fields.update(exact="true"),
        lambda fields: fields.update(read="everything"),
        lambda fields: fields.update(read=fields["read"].upper()),
    ],
)
def test_contexts_that_contradict_themselves_are_refused(edit) -> None:
    refused_as_corrupt(*mean_record(), edit)


def test_token_masses_are_rounded_to_float32() -> None:
    plain, kv = make_segment(1, contexts=2)
    record = with_profile(plain, outward=(0.1,) * 6)
    back = parsed(header_of(record, kv), kv).attention
    assert back.outward == pytest.approx((0.1,) * 6, rel=1e-7)
    assert back.outward != record.attention.outward
    assert back.inter == record.attention.inter, "the others keep every digit"


@pytest.mark.parametrize(
    "edit",
    [
        lambda fields: fields.pop("attention_sink"),
        lambda fields: fields.update(attention_intra="nan"),
        lambda fields: fields.update(attention_inter="0.1 -2 0.3"),
        lambda fields: fields.update(attention_lengths="5 7"),
        lambda fields: fields.update(attention_lengths="5 7 0"),
        lambda fields: fields.update(attention_chunks=" ".join(["0" * 32] * 3)),
        lambda fields: fields.update(attention_outward="AAAA"),
        lambda fields: fields.update(attention_outward="!"),
        lambda fields: fields.update(attention_outward=""),
    ],
)
def test_a_profile_that_contradicts_itself_is_refused(edit) -> None:
    plain, kv = make_segment(1, contexts=2)
    refused_as_corrupt(with_profile(plain), kv, edit)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_the_safetensors_library_reads_it(tmp_path: Path, codec: str) -> None:
    path, record, kv = write(tmp_path, codec=codec, layers=12)
    with safe_open(path, framework="pt") as file:
        assert len(file.keys()) == 12 * (1 if codec == "raw" else 2)
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert metadata["id"] == record.id
    assert tuple(map(int, metadata["token_ids"].split())) == record.token_ids
    one = make_codec(codec)
    for layer in range(12):
        for layout, tensor in zip(
            one.layout((2, 6, 2, 8), kv.kv.dtype), one.encode_layer(kv.layer(layer)), strict=True
        ):
            assert torch.equal(tensors[f"layer.{layer:03}{layout.suffix}"].float(), tensor.float())


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_layer_is_one_read_of_one_run(tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = write(tmp_path, codec=codec)
    source = open_segment(path)
    reads: list[tuple[int, int]] = []
    preadv = os.preadv

    def spy(file: int, buffers: list[memoryview], offset: int) -> int:
        reads.append((offset, len(buffers[0])))
        return preadv(file, buffers, offset)

    monkeypatch.setattr(segment_file.os, "preadv", spy)
    layers_of(source)
    run = source.header.layout.layer_bytes
    assert reads == [(source.header.data_start + layer * run, run) for layer in range(3)]
    assert source.header.data_start % 64 == 0
    assert reads[-1][0] + run == path.stat().st_size


def test_a_source_on_disk_can_be_written_elsewhere(tmp_path: Path) -> None:
    path, record, _ = write(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    assert put(other, record, open_segment(path)).read_bytes() == path.read_bytes()


def test_one_token_and_long_headers(tmp_path: Path) -> None:
    for number, shape in enumerate(({"tokens": 1}, {"tokens": 9000, "head_dim": 1, "kv_heads": 1}, {"contexts": 900})):
        path, _, kv = write(tmp_path, number, **shape)
        assert torch.equal(layers_of(open_segment(path)), kv.kv)


def test_sources_with_odd_characters(tmp_path: Path) -> None:
    for source in ("", 'quote " and \\ and \n', "漢字 🙂", "\ud800 lone"):
        record, kv = make_segment(1)
        path = put(tmp_path, replace(record, source=source), kv)
        assert read_header(path).record.source == source.replace("\ud800", "?")
        with safe_open(path, framework="pt") as file:
            assert file.metadata()["source"] == source.replace("\ud800", "?")


def test_what_does_not_fit_is_not_written(tmp_path: Path) -> None:
    record, kv = make_segment(1)
    wrong = [
        (replace(record, token_ids=record.token_ids[1:]), kv),
        (replace(record, id=make_segment(2)[0].id), kv),
        (record, SegmentKV(kv.kv.double())),
        (replace(record, token_ids=tuple(range(10**6)) * 2), kv),
    ]
    for bad_record, payload in wrong:
        with pytest.raises(UsageError):
            write_segment(tmp_path / f"{record.id}.safetensors", bad_record, payload, **head())
    with pytest.raises(OSError, match="NaN"):
        put(tmp_path, record, SegmentKV(kv.kv * torch.nan), "int8")
    assert files_under(tmp_path) == []


def test_a_writer_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, _, kv = write(tmp_path, 1)
    for name in ("_write_all", "sync_folder"):
        with monkeypatch.context() as patch:
            patch.setattr(segment_file, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                write(tmp_path, 2)
        assert files_under(tmp_path) == [old]
    assert torch.equal(layers_of(open_segment(old)), kv.kv)


def interrupted(*args: object) -> None:
    raise KeyboardInterrupt


def test_a_scratch_buffer_may_be_reused(tmp_path: Path) -> None:
    for number, codec in enumerate(sorted(CODECS)):
        path, _, _ = write(tmp_path, number, codec)
        source = open_segment(path)
        scratch = torch.full((source.header.layout.layer_bytes + 7,), 9, dtype=torch.uint8)
        reused = torch.stack([source.layer(layer, scratch) for layer in range(3)])
        assert codec == "raw" or torch.equal(reused, layers_of(source))
        assert torch.equal(source.layer(1, scratch), source.layer(1))


def test_layers_out_of_range(tmp_path: Path) -> None:
    source = open_segment(write(tmp_path)[0])
    for layer in (-1, 3):
        with pytest.raises(IndexError):
            source.layer(layer)


def test_a_file_deleted_or_replaced_while_open_is_lost_never_wrong(tmp_path: Path) -> None:
    path, record, kv = write(tmp_path)
    source = open_segment(path)
    assert torch.equal(source.layer(0), kv.layer(0))
    other = SegmentKV(kv.kv + 1)
    put(tmp_path, record, other)
    with pytest.raises(SegmentLost, match="checksum"):
        source.layer(1)
    put(tmp_path, replace(record, source=record.source + 100 * "x"), other)
    with pytest.raises(SegmentLost, match="bytes instead of"):
        source.layer(1)
    path.unlink()
    with pytest.raises(SegmentLost):
        source.layer(1)


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_no_descriptors_are_held(tmp_path: Path) -> None:
    before = open_descriptors()
    sources = [open_segment(write(tmp_path, number)[0]) for number in range(20)]
    for source in sources:
        layers_of(source)
    assert open_descriptors() == before


def test_many_threads_read_one_segment(tmp_path: Path) -> None:
    path, _, kv = write(tmp_path, layers=8)
    source = open_segment(path)

    def read(_: int) -> None:
        for _ in range(20):
            assert torch.equal(layers_of(source, 8), kv.kv)

    run_at_once(8, read)


def test_foreign_files(tmp_path: Path) -> None:
    path, _, _ = write(tmp_path)
    whole = path.read_bytes()
    text = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    assert refusal(path) is FileProblem.FOREIGN
    for text in (b"", b"1234567", bytes(1000), b"\xff" * 1000, os.urandom(10_000)):
        path.write_bytes(text)
        assert refusal(path) in (FileProblem.CORRUPT, FileProblem.FOREIGN)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(whole)
    path.unlink()
    path.symlink_to(elsewhere)
    assert refusal(path) is FileProblem.FOREIGN
    path.unlink()
    path.symlink_to(tmp_path / "dangling")
    assert refusal(path) is FileProblem.FOREIGN
    path.unlink()
    path.mkdir()
    assert refusal(path) is FileProblem.FOREIGN
    path.rmdir()
    os.mkfifo(path)
    assert refusal(path) is FileProblem.FOREIGN
    path.unlink()
    with pytest.raises(FileNotFoundError):
        open_segment(path)


def test_a_header_of_absurd_size_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = write(tmp_path)
    data = path.read_bytes()
    monkeypatch.setattr(segment_file, "_read_into", interrupted)
    for size in (2**64 - 1, 2**63, len(data), 5 << 20):
        path.write_bytes(struct.pack("<Q", size) + data[8:])
        if size == 5 << 20:
            os.truncate(path, 1 << 30)
        assert refusal(path) is FileProblem.CORRUPT


@pytest.mark.parametrize("version", [0, segment_header.FORMAT_VERSION + 1])
def test_another_version_is_refused_and_damage_is_not_taken_for_one(tmp_path: Path, version: int) -> None:
    record, kv = make_segment(1)
    other = header_of(record, kv, lambda fields: fields.update(chunkweave_segment=f"{version:04}")) + bytes(kv.nbytes)
    path = tmp_path / f"{record.id}.safetensors"
    path.write_bytes(other)
    assert refusal(path) is FileProblem.OTHER_VERSION
    damaged = bytearray(other)
    damaged[200] ^= 1
    path.write_bytes(damaged)
    assert refusal(path) is FileProblem.CORRUPT


def test_a_whole_file_under_another_name_is_refused(tmp_path: Path) -> None:
    path, _, _ = write(tmp_path)
    assert refusal(path.rename(tmp_path / f"{'0' * 32}.safetensors")) is FileProblem.CORRUPT


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"shape":"3 2 6 2 8"', b'"shape":"3 2 6 8 2"'),
        (b'"shape":"3 2 6 2 8"', b'"shape":"3 2 6 2 x"'),
        (b'"shape":"3 2 6 2 8"', b'"shape":"0 2 6 2 8"'),
        (b'"exact":"true"', b'"exact":"yes."'),
        (b'"codec":"raw"', b'"codec":"zip"'),
        (b'"dtype":"bfloat16"', b'"dtype":"bfloat17"'),
        (b'"data_offsets":[0,', b'"data_offsets":[1,'),
        (b'"layer.000"', b'"layer.009"'),
        (b'"context":"', b'"context":"../../'),
        (b'"created":"1', b'"created":"x'),
    ],
)
def test_a_header_with_a_right_checksum_is_not_believed_either(tmp_path: Path, old: bytes, new: bytes) -> None:
    path, _, _ = write(tmp_path)
    data = path.read_bytes()
    start = read_header(path).data_start
    text = data[8:start].replace(old, new)
    assert text != data[8:start]
    blank = struct.pack("<Q", len(text)) + text.replace(text[57:89], segment_header._NO_CHECKSUM)
    path.write_bytes(blank.replace(segment_header._NO_CHECKSUM, segment_header._checksum(blank)) + data[start:])
    assert refusal(path) is FileProblem.CORRUPT


def test_deeply_nested_headers(tmp_path: Path) -> None:
    text = b'{"__metadata__":{"chunkweave_segment":"0001","checksum":"' + segment_header._NO_CHECKSUM + b'",'
    text += b"[" * 100_000
    blank = struct.pack("<Q", len(text)) + text
    whole = blank.replace(segment_header._NO_CHECKSUM, segment_header._checksum(blank))
    with pytest.raises(SegmentRefused):
        parse_header(whole, len(whole))
