"""What a request to vLLM may say about its chunks, and what it is told when it says it wrong."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkweave.chunking.prompt import PartKind
from chunkweave.config import ReuseConfig
from chunkweave.errors import UsageError
from chunkweave.types import Span
from chunkweave.vllm.request import METHODS, Defaults, WeaveRequest, parse

BOS = 1
IDS = (BOS, 11, 12, 21, 22, 23, 31, 32, 41)


def read(params, ids=IDS, *, salt="", bos=BOS, defaults=None, fingerprint="model") -> WeaveRequest:
    return parse(params, ids, fingerprint=fingerprint, salt=salt, bos=bos, defaults=defaults or Defaults())


def kinds(request: WeaveRequest) -> list[tuple[str, tuple[int, ...]]]:
    return [(part.kind, part.token_ids) for part in request.prompt.parts]


def test_parts_cover_the_prompt_around_the_chunks():
    assert kinds(read({"chunks": [[3, 6], [6, 8]]})) == [
        (PartKind.START, (1,)),
        (PartKind.SYSTEM, (11, 12)),
        (PartKind.CHUNK, (21, 22, 23)),
        (PartKind.CHUNK, (31, 32)),
        (PartKind.QUESTION, (41,)),
    ]


def test_chunks_may_fill_the_prompt():
    assert kinds(read({"chunks": [[0, 9]]}, bos=None)) == [(PartKind.CHUNK, IDS)]


def test_without_bos_at_the_beginning_nothing_is_start():
    assert kinds(read({"chunks": [[2, 4]]}, IDS[1:]))[0] == (PartKind.SYSTEM, (11, 12))
    assert kinds(read({"chunks": [[2, 4]]}, bos=None))[0] == (PartKind.SYSTEM, (1, 11))


def test_start_tokens_may_be_said():
    assert kinds(read({"chunks": [[3, 6]], "start_tokens": 3}))[0] == (PartKind.START, (1, 11, 12))
    assert kinds(read({"chunks": [[1, 6]], "start_tokens": 0}))[0] == (PartKind.SYSTEM, (1,))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 5), st.integers(0, 5))
def test_whatever_the_chunks_the_parts_give_the_prompt_back(sizes, before, after):
    ids = tuple(range(100, 100 + before + sum(sizes) + after))
    edges = [before]
    for size in sizes:
        edges.append(edges[-1] + size)
    request = read({"chunks": list(pairwise(edges))}, ids)
    assert request.prompt.token_ids == ids
    spans = [
        span
        for part, span in zip(request.prompt.parts, request.prompt.spans(), strict=True)
        if part.kind is PartKind.CHUNK
    ]
    assert spans == [Span(a, b) for a, b in pairwise(edges)]


def test_defaults_are_the_connectors():
    defaults = Defaults.from_config({"method": "epic", "recompute_ratio": 0.3, "check_layers": [2, 4], "seed": 5})
    request = read({"chunks": [[3, 6]]}, defaults=defaults)
    assert request.method == "epic"
    assert request.reuse == ReuseConfig(recompute_ratio=0.3, check_layers=(2, 4), seed=5)
    assert read({"chunks": [[3, 6]], "method": "random"}, defaults=defaults).reuse == request.reuse


def test_without_a_word_about_it_reuse_is_exact():
    assert read({"chunks": [[3, 6]]}).method == "prefix"


def test_a_request_overrules_defaults():
    request = read(
        {"chunks": [[3, 6]], "method": "cacheblend", "recompute_ratio": 1, "check_layers": [1, 2], "seed": 7}
    )
    assert request.reuse == ReuseConfig(recompute_ratio=1.0, check_layers=(1, 2), seed=7)


FINE = {"chunks": [[3, 6]]}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("[[3, 6]]", "must be an object such as {'chunks': [[1, 120], [120, 260]]}"),
        ([[3, 6]], "must be an object"),
        (7, "must be an object"),
        ({}, "chunks must be a list of [start, stop] token positions"),
        ({"chunks": None}, "chunks must be a list of"),
        ({"chunks": 3}, "chunks must be a list of"),
        ({"chunks": "36"}, "chunks must be a list of"),
        ({"chunks": [3, 6]}, "chunks must be a list of"),
        ({"chunks": [[3]]}, "chunks must be a list of"),
        ({"chunks": [[3, 6, 7]]}, "chunks must be a list of"),
        ({"chunks": [["3", "6"]]}, "chunks must be a list of"),
        ({"chunks": [[3, 6.5]]}, "chunks must be a list of"),
        ({"chunks": [[3, float("inf")]]}, "chunks must be a list of"),
        ({"chunks": [[False, True]]}, "chunks must be a list of"),
        ({"chunks": [[-3, 6]]}, "chunks must be a list of"),
        ({"chunks": [[6, 3]]}, "chunks must be a list of"),
        ({"chunks": []}, "chunks must name at least one chunk, and no empty one"),
        ({"chunks": [[3, 3]]}, "chunks must name at least one chunk, and no empty one"),
        ({"chunks": [[3, 5], [6, 8]]}, "each chunk must begin where the one before it ends"),
        ({"chunks": [[3, 6], [5, 8]]}, "each chunk must begin where the one before it ends"),
        ({"chunks": [[3, 10]]}, "the last chunk ends at 10, but the prompt has 9 tokens"),
        ({**FINE, "ratio": 1, 3: 4}, "unknown fields of chunkweave: 3, ratio; there are check_layers, chunks"),
        ({**FINE, "start_tokens": 4}, "start_tokens must be between 0 and 3, where the first chunk begins"),
        ({**FINE, "start_tokens": -1}, "start_tokens must be between 0 and 3"),
        ({**FINE, "start_tokens": None}, "start_tokens must be a whole number, not None"),
        ({**FINE, "start_tokens": True}, "start_tokens must be a whole number, not True"),
        ({**FINE, "method": "magic"}, f"unknown reuse method 'magic'; inside vLLM there are: {', '.join(METHODS)}"),
        ({**FINE, "method": "cachecraft"}, "unknown reuse method 'cachecraft'"),
        ({**FINE, "method": None}, "unknown reuse method None"),
        ({**FINE, "method": ["prefix"]}, "unknown reuse method ['prefix']"),
        ({**FINE, "recompute_ratio": 1.1}, "recompute_ratio must be a number between 0 and 1, not 1.1"),
        ({**FINE, "recompute_ratio": -0.1}, "recompute_ratio must be a number between 0 and 1, not -0.1"),
        ({**FINE, "recompute_ratio": float("nan")}, "recompute_ratio must be a number between 0 and 1, not nan"),
        ({**FINE, "recompute_ratio": 10**400}, "recompute_ratio must be a number between 0 and 1"),
        ({**FINE, "recompute_ratio": "0.1"}, "recompute_ratio must be a number between 0 and 1, not '0.1'"),
        ({**FINE, "recompute_ratio": True}, "recompute_ratio must be a number between 0 and 1, not True"),
        ({**FINE, "recompute_ratio": None}, "recompute_ratio must be a number between 0 and 1, not None"),
        ({**FINE, "check_layers": 1}, "check_layers must be a list of layer numbers"),
        ({**FINE, "check_layers": "1"}, "check_layers must be a list of layer numbers"),
        ({**FINE, "check_layers": [1.0]}, "check_layers must be a whole number, not 1.0"),
        ({**FINE, "check_layers": [True]}, "check_layers must be a whole number, not True"),
        ({**FINE, "check_layers": []}, "check_layers must be ascending layer numbers from 1 on"),
        ({**FINE, "check_layers": [0]}, "check_layers must be ascending layer numbers from 1 on"),
        ({**FINE, "check_layers": [2, 1]}, "check_layers must be ascending layer numbers from 1 on"),
        ({**FINE, "seed": 1.5}, "seed must be a whole number, not 1.5"),
        ({**FINE, "seed": float("inf")}, "seed must be a whole number, not inf"),
        ({**FINE, "seed": "x"}, "seed must be a whole number, not 'x'"),
    ],
    ids=repr,
)
def test_what_is_wrong_is_said(params, message):
    with pytest.raises(UsageError) as caught:
        read(params)
    assert message in str(caught.value)


TEXT = st.sampled_from(["", "3", "epic", "\0"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["chunks", "start_tokens", "method", "recompute_ratio", "seed", "x"]), JSON))
def test_no_json_raises_anything_else(params):
    """In vLLM's scheduler any other exception would end the engine."""
    given_fields = json.loads(json.dumps({"chunks": [[3, 6]]} | params))
    try:
        read(given_fields)
    except UsageError:
        return


def test_a_layer_that_the_model_has_not_is_refused_where_that_is_known():
    params = {"chunks": [[3, 6]], "check_layers": [2, 4]}
    assert parse(params, IDS, fingerprint="model", salt="", bos=BOS, defaults=Defaults(), num_layers=5)
    with pytest.raises(UsageError, match="layer 4 is to be checked, but the model has 4 layers"):
        parse(params, IDS, fingerprint="model", salt="", bos=BOS, defaults=Defaults(), num_layers=4)


def test_wrong_defaults_are_refused_at_start():
    with pytest.raises(UsageError, match="recompute_ratio must be a number between 0 and 1"):
        Defaults.from_config({"recompute_ratio": 2})


def test_a_prompt_without_token_ids_is_refused():
    with pytest.raises(UsageError, match="the last chunk ends at 6, but the prompt has 0 tokens"):
        read({"chunks": [[3, 6]]}, ())


def ids_of(request: WeaveRequest) -> list[str]:
    return [part.id for part in request.prompt.parts if part.id is not None]


def test_chunk_ids_do_not_depend_on_position_but_on_model_salt_and_tokens():
    (chunk,) = ids_of(read({"chunks": [[1, 4]]}, (BOS, 21, 22, 23)))
    assert chunk in ids_of(read({"chunks": [[3, 6]]}))
    assert chunk not in ids_of(read({"chunks": [[3, 6]]}, salt="tenant"))
    assert chunk not in ids_of(read({"chunks": [[3, 6]]}, fingerprint="other"))
    assert chunk not in ids_of(read({"chunks": [[3, 7]]}))


def test_what_stands_behind_other_start_tokens_is_another_chunk():
    """No context names the start, so a segment computed behind another one would pass as an exact prefix."""
    chunk = (21, 22, 23)
    prompts = {
        "bos": read({"chunks": [[1, 4]]}, (BOS, *chunk)),
        "none": read({"chunks": [[0, 3]]}, chunk),
        "one": read({"chunks": [[1, 4]], "start_tokens": 1}, (7, *chunk)),
        "two": read({"chunks": [[2, 5]], "start_tokens": 2}, (BOS, 7, *chunk)),
    }
    assert len({tuple(ids_of(request)) for request in prompts.values()}) == len(prompts)


def test_the_salt_keeps_apart_what_differs_in_chunks_method_or_own_salt():
    base = read({"chunks": [[3, 6], [6, 8]], "method": "cacheblend"})
    same = read({"chunks": [[3, 6], [6, 8]], "method": "cacheblend"}, (*IDS[:-1], 99))
    assert base.salt(None) == same.salt(None)  # another question over the same chunks may share blocks
    others = [
        base.salt("tenant"),
        read({"chunks": [[3, 6], [6, 8]], "method": "epic"}).salt(None),
        read({"chunks": [[3, 6], [6, 8]], "method": "cacheblend", "recompute_ratio": 0.2}).salt(None),
        read({"chunks": [[3, 6], [6, 8]], "method": "cacheblend", "check_layers": [2]}).salt(None),
        read({"chunks": [[3, 6], [6, 8]], "method": "cacheblend", "seed": 1}).salt(None),
        read({"chunks": [[3, 6]], "method": "cacheblend"}).salt(None),
        read({"chunks": [[3, 6], [6, 8]], "method": "cacheblend"}, (*IDS[:6], 77, *IDS[7:])).salt(None),
    ]
    assert len({base.salt(None), *others}) == len(others) + 1


def test_what_can_be_stored_are_system_and_chunks_with_what_came_before_them():
    request = read({"chunks": [[3, 6], [6, 8]]})
    system, first, second = request.stored_parts()
    assert [part.span for part in (system, first, second)] == [Span(1, 3), Span(3, 6), Span(6, 8)]
    assert [part.token_ids for part in (system, first, second)] == [(11, 12), (21, 22, 23), (31, 32)]
    assert (system.context, first.context, second.context) == ((), (system.id,), (system.id, first.id))


def test_all_methods_are_the_projects_own():
    from chunkweave.planning.method import make_method

    for method in METHODS:
        assert make_method(method).name == method
