"""What a request to vLLM may say about its chunks, and the error when it is wrong."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkweave.config import DeviationFactor, QueryConfig, ReuseConfig, WatchedLayers
from chunkweave.errors import UsageError
from chunkweave.ordering.arrangement import Promotion
from chunkweave.planning.calibration import BOUNDS, Quality, Target
from chunkweave.planning.method import make_method
from chunkweave.planning.method_choice import Kept, MethodChooser, MethodRequest, Why
from chunkweave.plugins import METHODS
from chunkweave.prompt.contexts import MOST_CONTEXTS, MeanShare
from chunkweave.prompt.find_chunks import ChunkFinder
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id, neutral_id
from chunkweave.types import Span
from chunkweave.vllm.request import (
    REQUEST_FIELDS,
    Defaults,
    WeaveRequest,
    parse,
    parse_found,
    promotion_params,
    to_params,
    weave_params,
)
from tests.unit.test_calibration_record import make_record
from tests.unit.test_planning import GEOMETRY, make_lookup

BOS = 1
IDS = (BOS, 11, 12, 21, 22, 23, 31, 32, 41)


def read(params, ids=IDS, *, salt="", start=(BOS,), defaults=None, fingerprint="model") -> WeaveRequest:
    return parse(params, ids, fingerprint=fingerprint, salt=salt, start=start, defaults=defaults or Defaults())


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


@pytest.mark.parametrize(
    ("params", "salt", "why"),
    [
        ({"chunks": [[3, 6]]}, "\ud800", "cache_salt must be valid Unicode"),
        ({"chunks": [[3, 10**30]]}, "", "the last chunk ends at"),
        ({"chunks": [[3, 6]], "query": {"\ud800": 1}}, "", "unknown fields of query"),
    ],
)
def test_what_cannot_be_encoded_or_counted_is_the_clients_mistake(params, salt, why):
    with pytest.raises(UsageError, match=why) as raised:
        read(params, salt=salt)
    assert str(raised.value).encode()


def test_chunks_may_fill_the_prompt():
    assert kinds(read({"chunks": [[0, 9]]}, start=())) == [(PartKind.CHUNK, IDS)]


def test_the_first_chunks_may_be_neutral_passages():
    plain, neutral = (read({"chunks": [[3, 6], [6, 8]], "neutral": count}) for count in (0, 1))
    first, second = (part.id for part in plain.prompt.parts if part.kind is PartKind.CHUNK)
    assert [part.id for part in neutral.prompt.parts if part.kind is PartKind.CHUNK] == [neutral_id(first), second]
    for count in (-1, 3):
        with pytest.raises(UsageError, match="neutral must be between 0 and 2"):
            read({"chunks": [[3, 6], [6, 8]], "neutral": count})


def test_without_bos_at_the_beginning_nothing_is_start():
    assert kinds(read({"chunks": [[2, 4]]}, IDS[1:]))[0] == (PartKind.SYSTEM, (11, 12))
    assert kinds(read({"chunks": [[2, 4]]}, start=()))[0] == (PartKind.SYSTEM, (1, 11))


def test_start_is_what_prompts_usually_begin_with():
    request = read({"chunks": [[3, 6]]}, start=(1, 11))
    assert kinds(request)[:2] == [(PartKind.START, (1, 11)), (PartKind.SYSTEM, (12,))]


def test_behind_the_usual_start_a_chunk_has_the_id_that_our_own_engine_gives_it():
    for start, ids in (((BOS,), IDS), ((), IDS[1:])):
        request = read({"chunks": [[len(start), len(ids)]]}, ids, start=start, salt="s")
        assert request.prompt.parts[-1].id == chunk_id("model", "s", IDS[1:])
    other = read({"chunks": [[0, 8]]}, IDS[1:], salt="s")
    assert other.prompt.parts[-1].id != chunk_id("model", "s", IDS[1:])


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
    assert read({"chunks": [[3, 6]], "method": "epic"}, defaults=defaults).reuse == request.reuse


def test_without_a_word_about_it_reuse_is_exact():
    assert read({"chunks": [[3, 6]]}).method == "prefix"


def test_a_request_overrules_defaults():
    request = read({"chunks": [[3, 6]], "method": "cacheblend", "recompute_ratio": 1, "check_layers": [1, 2]})
    assert request.reuse == ReuseConfig(recompute_ratio=1.0, check_layers=(1, 2))


FINE = {"chunks": [[3, 6]]}


def each(name, message, *values):
    """Rows of requests that have these values in a field."""
    return [({**FINE, name: value}, message) for value in values]


NAN, INFINITY, HUGE = float("nan"), float("inf"), 10**400
NO_SPANS = [None, 3, "36", [3, 6], [[3]], [[3, 6, 7]], [["3", "6"]], [[3, 6.5]], [[3, INFINITY]], [[False, True]]]
NO_MEANS = [3, "a", [["group", "a"], ["of", 4]], {}, {"group": "a"}, {"group": "a", "of": 4, "by": 1}]
SHARE_OF_FOUR = {"group": "a", "of": 4}
NOT_FULL_REUSE = [
    {"chunks": [[3, 6], [6, 9]]},
    {"chunks": [[3, 6], [6, 9]], "method": "prefix"},
    {"chunks": [[3, 6], [6, 9]], "method": "cacheblend"},
    {"chunks": [[3, 6], [6, 8]], "method": "full-reuse"},
]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("[[3, 6]]", "must be an object such as {'chunks': [[1, 120], [120, 260]]}"),
        ([[3, 6]], "must be an object"),
        (7, "must be an object"),
        ({}, "chunks must be a list of [start, stop] token positions"),
        *each("chunks", "chunks must be a list of", *NO_SPANS, [[-3, 6]], [[6, 3]]),
        *each("chunks", "chunks must name at least one chunk, and no empty one", [], [[3, 3]]),
        *each("chunks", "each chunk must begin where the one before it ends", [[3, 5], [6, 8]], [[3, 6], [5, 8]]),
        *each("chunks", "the last chunk ends at 10, but the prompt has 9 tokens", [[3, 10]]),
        ({**FINE, "ratio": 1, 3: 4}, "unknown fields of chunkweave: 3, ratio; there are alpha, at_least"),
        *each("recompute_ratoi", "chunkweave: recompute_ratoi (did you mean recompute_ratio?); there are", 1),
        *each("start_tokens", "start_tokens must be between 0 and 3, where the first chunk begins", 4, -1),
        *each("start_tokens", "start_tokens must be a whole number, not", None, True),
        *each("method", f"unknown reuse method 'magic'; there are: {', '.join(METHODS.names)}", "magic"),
        *each("method", "unknown reuse method", None, ["prefix"], "random", "set-cache"),
        *each("method", "unknown setting 'loud' of query; there are: last, whole", "query:loud"),
        *each("method", "unknown setting '' of query", "query:"),
        *each("method", "at least one token of the question", "query:tail=0"),
        *each("recompute_ratio", "recompute_ratio must be a number between 0 and 1, not", 1.1, -0.1, NAN, "0.1"),
        *each("recompute_ratio", "recompute_ratio must be a number between 0 and 1", HUGE, True, None),
        *each("check_layers", "check_layers must be a list of layer numbers", 1, "1"),
        *each("check_layers", "check_layers must be a whole number, not", [1.0], [True]),
        *each("check_layers", "check_layers must be ascending layer numbers from 1 on", [], [0], [2, 1]),
        *each("promoted", "promoted must be a list of chunk numbers, not 0", 0),
        *each("promoted", "promoted must be chunk numbers from 0 to 0", [1]),
        *each("continued", "continued must be chunk numbers from 0 to 0", [-1]),
        *each("continued", "continued must be a whole number, not 0.0", [0.0]),
        *each("seed", "seed must be a whole number, not", 1.5, INFINITY, "x"),
        *each("alpha", "alpha must be a number, not", "1", True, HUGE),
        *each("alpha", "alpha must be a number from 0 on", -1, NAN),
        *each("focus", "focus must be true or false, not 1", 1),
        *each("capture", "capture must be true or false, not None", None),
        *each("quality", "unknown quality 'best'; there are: exact, balanced, fast", "best"),
        *each("quality", "unknown quality ['fast']", ["fast"]),
        *each("quality", "quality 'fast' needs a calibration record", "fast"),
        ({**FINE, "quality": "exact", "method": "query"}, "quality 'exact' and method 'query' are both given"),
        *each("query", "query must be an object such as {'tail': 4, 'layers': 'late'}", 3),
        *each("query", "unknown fields of query: tails; there are factor, layers, rounds, tail", {"tails": 3}),
        *each("query", "query.tail must be a whole number, not 'all'", {"tail": "all"}),
        *each("query", "at least one token of the question must be watched, not 0", {"tail": 0}),
        *each("query", "query.layers must be one of all, late, first-third, not 'early'", {"layers": "early"}),
        *each("query", "query.layers must be one of all, late, first-third, not [1, 2]", {"layers": [1, 2]}),
        *each("query", "query.factor must be one of none, stored, not", {"factor": None}, {"factor": "measured"}),
        *each("query", "query can only be given with a method that takes it", {"tail": 2}),
        *each("query", "rounds must be 1 or 2, not 3", {"rounds": 3}),
        ({**FINE, "method": "epic", "seed": 1}, "method 'epic' takes no seed: it takes recompute_ratio"),
        ({**FINE, "method": "cachecraft", "query": {"tail": 2}}, "'cachecraft' takes no query: it takes alpha, focus"),
        ({**FINE, "method": "query:late", "query": {"tail": 2}}, "method 'query:late' sets query already"),
        *each("mean", "mean must be an object such as {'group': 'a name', 'of': 4}", *NO_MEANS),
        *(
            ({**FINE, "mean": {"group": group, "of": 4}}, "mean.group must be a text of at most 200 characters")
            for group in (None, 7, "", "x" * 201, ["a"])
        ),
        *(
            ({**FINE, "mean": {"group": "a", "of": count}}, f"mean.of must be between 1 and {MOST_CONTEXTS}")
            for count in (0, -1, MOST_CONTEXTS + 1)
        ),
        *each("mean", "mean.of must be a whole number, not", {"group": "a", "of": "4"}, {"group": "a", "of": True}),
        *each("mean", "mean.anew must be true or false, not 1", {**SHARE_OF_FOUR, "anew": 1}),
        *(
            ({**fields, "mean": SHARE_OF_FOUR}, "mean needs method 'full-reuse', and a prompt that ends with")
            for fields in NOT_FULL_REUSE
        ),
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


FIELDS = ["chunks", "start_tokens", "method", "quality", "recompute_ratio", "seed", "alpha", "focus", "query", "x"]
FIELDS += ["promoted", "continued", "mean"]
QUERY = ["tail", "layers", "over_heads", "factor", "rounds", "until", "group", "of"]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON | st.dictionaries(st.sampled_from(QUERY), JSON | st.just("late"))))
def test_no_json_raises_anything_else(params):
    """In vLLM's scheduler any other exception would end the engine."""
    given_fields = json.loads(json.dumps({"chunks": [[3, 6]]} | params))
    try:
        read(given_fields)
    except UsageError:
        return


def test_a_layer_that_the_model_has_not_is_refused_where_that_is_known():
    params = {"chunks": [[3, 6]], "method": "cacheblend", "check_layers": [2, 4]}
    assert parse(params, IDS, fingerprint="model", salt="", start=(BOS,), defaults=Defaults(), num_layers=5)
    with pytest.raises(UsageError, match="check_layers has layer 4, but the model has 4 layers"):
        parse(params, IDS, fingerprint="model", salt="", start=(BOS,), defaults=Defaults(), num_layers=4)


def test_wrong_defaults_are_refused_at_start():
    with pytest.raises(UsageError, match="recompute_ratio must be a number between 0 and 1"):
        Defaults.from_config({"recompute_ratio": 2})


FOUND_IDS = list(range(3, 1003))


def found(params, ids=FOUND_IDS):
    finder = ChunkFinder(None, frozenset())
    return parse_found(params, ids, finder, fingerprint="model", salt="", start=(1,), defaults=Defaults())


def test_chunks_are_found_in_a_prompt_that_names_none():
    request = found({"method": "cacheblend", "recompute_ratio": 0.3})
    assert request.prompt.token_ids == tuple(FOUND_IDS)
    assert (request.method, request.reuse.recompute_ratio, request.raisable) == ("cacheblend", 0.3, False)
    assert all(part.exact_only for part in request.stored_parts())
    assert found({}, ids=FOUND_IDS[:20]) is None
    assert not found({"cache": "use"}).reads_only
    only_read = found({"cache": "read"})
    assert only_read.reads_only
    assert not only_read.kept.kv
    for wrong in ({"neutral": 1}, {"start_tokens": 1}, {"mean": {}}, {"alpha": 1}, {"unknown": 1}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            found(wrong)


def ids_of(request: WeaveRequest) -> list[str]:
    return [part.id for part in request.prompt.parts if part.id is not None]


def test_chunk_ids_do_not_depend_on_position_but_on_model_salt_and_tokens():
    (chunk,) = ids_of(read({"chunks": [[1, 4]]}, (BOS, 21, 22, 23)))
    assert chunk in ids_of(read({"chunks": [[3, 6]]}))
    assert chunk not in ids_of(read({"chunks": [[3, 6]]}, salt="tenant"))
    assert chunk not in ids_of(read({"chunks": [[3, 6]]}, fingerprint="other"))
    assert chunk not in ids_of(read({"chunks": [[3, 7]]}))


def test_what_comes_after_other_start_tokens_is_another_chunk():
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
    assert base.salt == same.salt  # another question over the same chunks may share blocks
    others = [
        read({"chunks": [[3, 6], [6, 8]], "method": "cacheblend"}, salt="tenant").salt,
        read({"chunks": [[3, 6], [6, 8]], "method": "epic"}).salt,
        read({"chunks": [[3, 6], [6, 8]], "method": "cacheblend", "recompute_ratio": 0.2}).salt,
        read({"chunks": [[3, 6], [6, 8]], "method": "cacheblend", "check_layers": [2]}).salt,
        read({"chunks": [[3, 6]], "method": "cacheblend"}).salt,
        read({"chunks": [[3, 6], [6, 8]], "method": "cacheblend"}, (*IDS[:6], 77, *IDS[7:])).salt,
    ]
    assert len({base.salt, *others}) == len(others) + 1


SHARE = {"chunks": [[3, 6], [6, 9]], "method": "full-reuse", "mean": {"group": "a name", "of": 4}}


def test_of_one_for_a_mean_no_part_is_kept_and_no_other_request_takes_its_blocks():
    share, plain = read(SHARE), read({name: value for name, value in SHARE.items() if name != "mean"})
    assert (share.mean, plain.mean) == (MeanShare("a name", 4), None)
    assert share.kept_parts(lambda _: False) == []
    assert len(plain.kept_parts(lambda _: False)) == len(list(share.stored_parts())) == 3
    assert share.prompt == plain.prompt
    assert share.salt != plain.salt


@pytest.mark.parametrize(("count", "anew"), [(1, False), (MOST_CONTEXTS, True)])
def test_what_the_front_sends_for_a_mean_is_what_the_plug_in_reads(count, anew):
    parts = [(PartKind.START, (BOS,)), (PartKind.SYSTEM, (11, 12)), (PartKind.CHUNK, (21, 22, 23))]
    parts.append((PartKind.CHUNK, (31, 32)))
    prompt = Prompt(
        tuple(PromptPart(kind, ids, None if kind is PartKind.START else chunk_id("m", "", ids)) for kind, ids in parts)
    )
    share = MeanShare("x" * 200, count, anew=anew)
    sent = weave_params(prompt, MethodChooser().choose(MethodRequest.of("full-reuse")), None, mean=share)
    got = read(json.loads(json.dumps(sent)), prompt.token_ids)
    assert (got.mean, got.method) == (share, "full-reuse")
    assert kinds(got) == [(kind, ids) for kind, ids in parts]


def test_what_can_be_stored_are_system_and_chunks_with_what_came_before_them():
    request = read({"chunks": [[3, 6], [6, 8]]})
    system, first, second = request.stored_parts()
    assert [part.span for part in (system, first, second)] == [Span(1, 3), Span(3, 6), Span(6, 8)]
    assert [part.token_ids for part in (system, first, second)] == [(11, 12), (21, 22, 23), (31, 32)]
    assert (system.context, first.context, second.context) == ((), (system.id,), (system.id, first.id))


@pytest.mark.parametrize("method", METHODS.names)
def test_every_method_can_be_asked_for(method):
    request = read({"chunks": [[3, 6]], "method": method})
    assert (request.method, request.choice.why) == (method, Why.ASKED_FOR)


WHOLE = QueryConfig(tail=None, layers=WatchedLayers.LATE, factor=DeviationFactor.STORED)


@pytest.mark.parametrize(
    ("method", "reuse"),
    [
        ("cacheblend", ReuseConfig()),
        ("cacheblend", ReuseConfig(0.3, (1, 4))),
        ("cachecraft", ReuseConfig(alpha=0.5, focus=False)),
        ("query", ReuseConfig(0.3, query=QueryConfig(tail=None, rounds=2))),
        ("query", ReuseConfig(query=QueryConfig(layers=WatchedLayers.FIRST_THIRD, factor=DeviationFactor.STORED))),
        ("query:whole:late:stored", ReuseConfig(0.05)),
        ("query-whole", ReuseConfig(0.05)),
        ("prefix", ReuseConfig()),
    ],
)
def test_what_is_sent_arrives_whatever_the_connector_was_given(method, reuse):
    choice = MethodChooser(reuse=reuse).choose(MethodRequest(method))
    params = json.loads(json.dumps({"chunks": [[3, 6]], "method": choice.method, **to_params(choice)}))
    other = {"recompute_ratio": 0.7, "check_layers": [2], "alpha": 3, "focus": False, "query": {"rounds": 2}}
    for config in ({}, other):
        assert read(params, defaults=Defaults.from_config(config)).choice.parameters == choice.parameters


def test_a_client_of_vllm_itself_may_send_a_specification():
    assert read({**FINE, "method": "query:whole:late:stored"}).reuse == ReuseConfig(query=WHOLE)
    assert read({**FINE, "method": "cachecraft:no-focus"}).reuse == ReuseConfig(focus=False)
    assert read(FINE, defaults=Defaults.from_config({"method": "query:whole:late:stored"})).reuse.query == WHOLE


EFFECTS = {
    "method": lambda method: {"method": "full" if method == "prefix" else "prefix"},
    "quality": lambda _: {"quality": "exact"},
    "recompute_ratio": lambda _: {"recompute_ratio": 0.9},
    "check_layers": lambda _: {"check_layers": [2]},
    "alpha": lambda _: {"alpha": 0.3},
    "focus": lambda _: {"focus": False},
    "seed": lambda _: {"seed": 3},
    "query": lambda _: {"query": {"tail": 2}},
    "capture": lambda method: {"capture": method not in ("cachecraft", "query-whole", "query:whole:late:stored")},
    "chunks": lambda _: {"chunks": [[3, 6]]},
    "start_tokens": lambda _: {"start_tokens": 2},
    "counts_as_request": lambda _: {"counts_as_request": False},
    "find_chunks": lambda _: {"find_chunks": True},
    "neutral": lambda _: {"neutral": 1},
    "at_least": lambda _: {"at_least": False},
    "promoted": lambda _: {"promoted": [0]},
    "continued": lambda _: {"continued": [0]},
    "mean": lambda _: {"mean": {"group": "a name", "of": 4}},
    "cache": lambda _: {"cache": "read"},
}
"""By field, what a request says with it; it says less without."""

PLANNED = make_lookup((10, 20, 30), stored={0, 1, 2})


def test_every_field_that_a_request_may_have_is_crossed_with_every_method():
    assert EFFECTS.keys() == REQUEST_FIELDS, "say here what a new field changes"


@pytest.mark.parametrize("method", [*METHODS.names, "query:whole:late:stored"])
@pytest.mark.parametrize("field", sorted(REQUEST_FIELDS))
def test_each_field_has_an_effect_with_each_method_or_is_refused(field, method):
    """Of a parameter it is the plan that differs, of the others what is read."""
    plain = {"chunks": [[3, 6], [6, 9 if field == "mean" else 8]], "method": method}
    without, given = read(plain), {**plain, **EFFECTS[field](method)}
    parameter = field in {"recompute_ratio", "check_layers", "alpha", "focus", "seed", "query"}
    taken = field in without.choice.parameters and not (field == "query" and ":" in method)
    if field in ("quality", "find_chunks") or (parameter and not taken) or (field == "mean" and method != "full-reuse"):
        with pytest.raises(UsageError, match=field):
            read(given)
    elif parameter:
        one, other = (make_method(one.method, one.reuse) for one in (without, read(given)))
        assert one.plan(PLANNED, GEOMETRY).passes != other.plan(PLANNED, GEOMETRY).passes
    else:
        assert read(given) != without


def test_a_request_that_only_reads_keeps_nothing():
    found = read({**FINE, "method": "cachecraft", "cache": "read"})
    assert found.reads_only
    assert (found.kept.kv, found.kept.profiles, found.kept_parts(lambda _: False)) == (False, False, [])
    assert not read({**FINE, "cache": "use"}).reads_only
    for wrong in ("off", "", None, 1, ["read"]):
        with pytest.raises(UsageError, match="cache must be use or read"):
            read({**FINE, "cache": wrong})


@pytest.mark.parametrize("kept", [None, (), (0, 2)])
@pytest.mark.parametrize("continued", [(), (1,)])
def test_a_promotion_that_is_sent_arrives(kept, continued):
    chunks = {"chunks": [[3, 6], [6, 8], [8, 9]]}
    ids = [part.id for part in read(chunks).prompt.parts if part.kind is PartKind.CHUNK]
    wanted = Promotion(
        None if kept is None else frozenset(ids[one] for one in kept), frozenset(ids[one] for one in continued)
    )
    params = promotion_params(read(chunks).prompt, wanted)
    assert read(json.loads(json.dumps({**chunks, **params}))).promotion == wanted
    assert read(chunks).promotion == Promotion()


def test_what_depends_on_the_question_shares_no_blocks_with_another_question():
    def salt(ids=IDS, **more) -> str:
        return read({"chunks": [[3, 6], [6, 8]], **more}, ids).salt

    other = (*IDS[:-1], 99)
    assert salt(method="query") == salt(method="query")
    assert salt(method="query") != salt(other, method="query")
    assert salt(method="cachecraft") != salt(other, method="cachecraft")
    assert salt(method="cachecraft", focus=False) == salt(other, method="cachecraft", focus=False)
    assert salt(method="epic") == salt(other, method="epic")


@pytest.mark.parametrize(
    ("params", "server", "kept"),
    [
        ({}, {}, Kept()),
        ({"method": "cachecraft"}, {}, Kept(profiles=True)),
        ({"method": "cachecraft", "capture": False}, {}, Kept()),
        ({"method": "query"}, {}, Kept()),
        ({"method": "query", "query": {"factor": "stored"}}, {}, Kept(profiles=True)),
        ({"method": "prefix"}, {"method": "cachecraft"}, Kept(profiles=True)),
        ({"method": "prefix"}, {"capture": True}, Kept(profiles=True)),
        ({"method": "cachecraft"}, {"capture": False}, Kept()),
        ({"method": "cachecraft", "capture": True}, {"capture": False}, Kept(profiles=True)),
        ({"method": "full"}, {"method": "full"}, Kept(kv=False)),
        ({"method": "prefix"}, {"method": "full"}, Kept()),
        ({"method": "full", "capture": True}, {"method": "full"}, Kept(profiles=True)),
    ],
)
def test_what_may_be_reused_is_kept_with_attention_where_a_method_needs_it(params, server, kept):
    assert read({"chunks": [[3, 6]], **params}, defaults=Defaults.from_config(server)).kept == kept


CALIBRATED = make_record(
    fingerprint="model",
    reuse=dict.fromkeys(("query", "cachecraft"), ReuseConfig(seed=3)),
    targets={
        Quality.BALANCED: Target(BOUNDS[Quality.BALANCED], {"query": 0.1}, "query"),
        Quality.FAST: Target(BOUNDS[Quality.FAST], {"cachecraft": 0.5}, "cachecraft"),
    },
)


@pytest.mark.parametrize(
    ("server", "params", "method", "why"),
    [
        ({}, {}, "query", Why.CALIBRATED),
        ({}, {"quality": "exact"}, "prefix", Why.EXACT),
        ({"quality": "fast"}, {}, "cachecraft", Why.CALIBRATED),
        ({"method": "prefix"}, {"quality": "balanced"}, "query", Why.CALIBRATED),
    ],
)
def test_a_calibration_record_says_what_a_quality_means(server, params, method, why):
    request = read({"chunks": [[3, 6]], **params}, defaults=Defaults.from_config(server, CALIBRATED))
    assert (request.method, request.choice.why) == (method, why)
    if why is Why.CALIBRATED:
        assert request.reuse.seed == 3
        query = {"tail": 1, "layers": "all", "factor": "none", "rounds": 1}
        found = {"query": {"recompute_ratio": 0.1, "query": query}, "cachecraft": {"alpha": 0.5, "focus": True}}
        assert request.choice.parameters == found[method]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"chunks": [[1, 1]] * 1_000_000}, "1000000 chunks are named in a prompt of"),
        ({"promoted": [0] * 1_000_000}, "promoted names 1000000 chunks, and there are"),
        ({"method": "cacheblend", "check_layers": [1] * 1_000_000}, "1000 layer numbers, not 1000000"),
    ],
    ids=["chunks", "promoted", "check_layers"],
)
def test_lists_that_are_too_long_are_refused_by_their_length(wrong, said):
    with pytest.raises(UsageError, match=said):
        read({"chunks": [[3, 6], [6, 8]], **wrong})
