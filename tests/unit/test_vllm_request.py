"""What a request to vLLM may say about its chunks, and the error when it is wrong."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkweave.config import DeviationFactor, QueryConfig, ReuseConfig, WatchedLayers
from chunkweave.conversation.weave_request import WeaveRequest
from chunkweave.errors import UsageError
from chunkweave.ordering.arrangement import Promotion
from chunkweave.planning.calibration import BOUNDS, Quality, Target
from chunkweave.planning.method import settings_of_method
from chunkweave.planning.method_choice import Kept, MethodChooser, MethodRequest, Why
from chunkweave.plugins import METHODS
from chunkweave.prompt.contexts import MOST_CONTEXTS, MeanShare
from chunkweave.prompt.find_chunks import ChunkFinder
from chunkweave.prompt.parts import PartKind, Prompt, PromptPart, chunk_id, neutral_id
from chunkweave.prompt.runs import RunIndex
from chunkweave.types import Span
from chunkweave.vllm.request import REQUEST_FIELDS, Defaults, from_wire, promotion_params, to_wire, with_found_chunks
from tests.unit.test_calibration_record import make_record
from tests.unit.test_planning import GEOMETRY, make_lookup

BOS = 1
IDS = (BOS, 11, 12, 21, 22, 23, 31, 32, 41)


def read(params, ids=IDS, *, salt="", start=(BOS,), defaults=None, fingerprint="model") -> WeaveRequest:
    return from_wire(params, ids, fingerprint=fingerprint, salt=salt, start=start, defaults=defaults or Defaults())


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
        ({"chunks": [[3, 6]], "method": "query:\ud800"}, "", "unknown setting"),
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
    defaults = Defaults.from_config({"method": "epic:ratio=0.3"})
    request = read({"chunks": [[3, 6]]}, defaults=defaults)
    assert (request.method, request.reuse) == ("epic", ReuseConfig(recompute_ratio=0.3))
    assert read({"chunks": [[3, 6]], "method": "epic"}, defaults=defaults).reuse == ReuseConfig()


def test_without_a_word_about_it_reuse_is_exact():
    assert read({"chunks": [[3, 6]]}).method == "prefix"


def test_a_request_overrules_defaults():
    request = read({"chunks": [[3, 6]], "method": "cacheblend:ratio=1:layers=1+2"})
    assert request.reuse == ReuseConfig(recompute_ratio=1.0, check_layers=(1, 2))


FINE = {"chunks": [[3, 6]]}


def each(name, message, *values):
    """Rows of requests that have these values in a field."""
    return [({**FINE, name: value}, message) for value in values]


INFINITY = float("inf")
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
        ({**FINE, "ratio": 1, 3: 4}, "unknown fields of chunkweave: 3, ratio; there are at_least, cache"),
        *each("metod", "chunkweave: metod (did you mean method?); there are", 1),
        *each("start_tokens", "start_tokens must be between 0 and 3, where the first chunk begins", 4, -1),
        *each("start_tokens", "start_tokens must be a whole number, not", None, True),
        *each("method", f"unknown reuse method 'magic'; there are: {', '.join(METHODS.names)}", "magic"),
        *each("method", "unknown reuse method", None, ["prefix"], "random", "set-cache"),
        *each("method", "unknown setting 'loud' of query; there are: ratio=VALUE, last", "query:loud"),
        *each("method", "unknown setting '' of query", "query:"),
        *each("method", "at least one token of the question", "query:tail=0"),
        *each(
            "method",
            "recompute_ratio must be between 0 and 1, not",
            "epic:ratio=1.1",
            "epic:ratio=-1",
            "epic:ratio=nan",
        ),
        *each("method", "'ratio=much' needs a number after =, such as 4", "epic:ratio=much"),
        *each("method", "'layers=1+x' needs numbers after =, such as 1+4", "cacheblend:layers=1+x"),
        *each("method", "ascending layer numbers from 1 on", "cacheblend:layers=0", "cacheblend:layers=2+1"),
        *each("method", "alpha must be a number from 0 on", "cachecraft:alpha=-1", "cachecraft:alpha=inf"),
        *each("method", "unknown setting 'ratio=1' of cachecraft; there are: alpha=VALUE, focus", "cachecraft:ratio=1"),
        *each("method", "unknown setting 'focus' of prefix; there are: none", "prefix:focus"),
        *each("method", "sets twice what 'ratio=1' sets", "epic:ratio=0:ratio=1"),
        *each("method", "has at most 200 characters, not 1000010", "cacheblend" + ":ratio=0.1" * 100_000),
        *each("promoted", "promoted must be a list of chunk numbers, not 0", 0),
        *each("promoted", "promoted must be chunk numbers from 0 to 0", [1]),
        *each("continued", "continued must be chunk numbers from 0 to 0", [-1]),
        *each("continued", "continued must be a whole number, not 0.0", [0.0]),
        *each("capture", "capture must be true or false, not None", None),
        *each("quality", "unknown quality 'best'; there are: exact, balanced, fast", "best"),
        *each("quality", "unknown quality ['fast']", ["fast"]),
        *each("quality", "quality 'fast' needs a calibration record", "fast"),
        ({**FINE, "quality": "exact", "method": "query"}, "quality 'exact' and method 'query' are both given"),
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


FIELDS = ["chunks", "start_tokens", "method", "quality", "x", "promoted", "continued", "mean"]
SHARES = ["group", "of", "anew"]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON | st.dictionaries(st.sampled_from(SHARES), JSON)))
def test_no_json_raises_anything_else(params):
    """In vLLM's scheduler any other exception would end the engine."""
    given_fields = json.loads(json.dumps({"chunks": [[3, 6]]} | params))
    try:
        read(given_fields)
    except UsageError:
        return


def test_a_layer_that_the_model_has_not_is_refused_where_that_is_known():
    params = {"chunks": [[3, 6]], "method": "cacheblend:layers=2+4"}
    assert read(params, defaults=Defaults.from_config({}, num_layers=5)).reuse.check_layers == (2, 4)
    with pytest.raises(UsageError, match="cacheblend:layers=2\\+4 checks layer 4, but the model has 4 layers"):
        read(params, defaults=Defaults.from_config({}, num_layers=4))
    assert read({**params, "method": "cacheblend"}, defaults=Defaults.from_config({}, num_layers=2))


def test_wrong_defaults_are_refused_at_start():
    with pytest.raises(UsageError, match="recompute_ratio must be between 0 and 1"):
        Defaults.from_config({"method": "epic:ratio=2"})


FOUND_IDS = list(range(3, 1003))


def found(params, ids=FOUND_IDS):
    finder = ChunkFinder(None, RunIndex(lambda chunk: True))
    return with_found_chunks(params, ids, finder, fingerprint="model", salt="", start=(1,), defaults=Defaults())


def test_chunks_are_found_in_a_prompt_that_names_none():
    request = found({"method": "cacheblend:ratio=0.3"})
    assert request.prompt.token_ids == tuple(FOUND_IDS)
    assert (request.method, request.reuse.recompute_ratio, request.raisable) == ("cacheblend", 0.3, False)
    assert all(part.in_place for part in request.stored_parts())
    assert found({}, ids=FOUND_IDS[:20]) is None
    assert not found({"cache": "use"}).reads_only
    only_read = found({"cache": "read"})
    assert only_read.reads_only
    assert not only_read.kept.kv
    for wrong in ({"neutral": 1}, {"start_tokens": 1}, {"mean": {}}, {"unknown": 1}):
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
        read({"chunks": [[3, 6], [6, 8]], "method": "cacheblend:ratio=0.2"}).salt,
        read({"chunks": [[3, 6], [6, 8]], "method": "cacheblend:layers=2"}).salt,
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
    sent = to_wire(WeaveRequest(prompt, MethodChooser().choose(MethodRequest("full-reuse")), Kept(), mean=share))
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


SPECS = [
    *METHODS.names,
    "cacheblend:ratio=0.3:layers=1+4",
    "cachecraft:alpha=2.0:no-focus",
    "query:whole:late:ratio=0.05",
]
FLAGS = ("raisable", "counts_as_request", "reads_only")


@given(
    st.sampled_from(SPECS),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(0, 3),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.data(),
)
def test_what_is_sent_arrives_whatever_the_connector_was_given(spec, sizes, system, flags, data):
    ids = (BOS, *range(10, 10 + system + sum(sizes) + 1))
    edges = [1 + system + sum(sizes[:number]) for number in range(len(sizes) + 1)]
    numbers = st.sets(st.integers(0, len(sizes) - 1)).map(sorted)
    fields = {"promoted": data.draw(numbers), "continued": data.draw(numbers)}
    fields |= {"chunks": list(pairwise(edges)), "method": spec, "neutral": data.draw(st.integers(0, len(sizes)))}
    sent = replace(read(fields, ids), **dict(zip(FLAGS, flags, strict=True)))
    for config in ({}, {"method": "cachecraft:alpha=3"}):
        arrived = read(json.loads(json.dumps(to_wire(sent))), ids, defaults=Defaults.from_config(config))
        assert replace(arrived, kept=sent.kept) == sent, "what is stored is for the connector to say"


def test_a_client_of_vllm_itself_may_send_a_specification():
    assert read({**FINE, "method": "query:whole:late:stored"}).reuse == ReuseConfig(query=WHOLE)
    assert read({**FINE, "method": "cachecraft:no-focus"}).reuse == ReuseConfig(focus=False)
    assert read(FINE, defaults=Defaults.from_config({"method": "query:whole:late:stored"})).reuse.query == WHOLE


EFFECTS = {
    "method": lambda method: {"method": "full" if method == "prefix" else "prefix"},
    "quality": lambda _: {"quality": "exact"},
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
    plain = {"chunks": [[3, 6], [6, 9 if field == "mean" else 8]], "method": method}
    without, given = read(plain), {**plain, **EFFECTS[field](method)}
    if field in ("quality", "find_chunks") or (field == "mean" and method != "full-reuse"):
        with pytest.raises(UsageError, match=field):
            read(given)
    else:
        assert read(given) != without


VALUES = {"ratio=": "ratio=0.9", "alpha=": "alpha=0.3", "layers=": "layers=2", "tail=": "tail=2"}


@pytest.mark.parametrize(
    "spec", [f"{method}:{VALUES.get(name, name)}" for method in METHODS.names for name in settings_of_method(method)]
)
def test_each_setting_of_a_method_changes_its_plan_or_is_its_default(spec):
    plain, other = (read({**FINE, "method": text}).choice for text in (spec.partition(":")[0], spec))
    plans = [choice.made.plan(PLANNED, GEOMETRY).passes for choice in (plain, other)]
    assert (plans[0] != plans[1]) == (plain.parameters != other.parameters)


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
    assert salt(method="cachecraft:no-focus") == salt(other, method="cachecraft:no-focus")
    assert salt(method="epic") == salt(other, method="epic")


@pytest.mark.parametrize(
    ("params", "server", "kept"),
    [
        ({}, {}, Kept()),
        ({"method": "cachecraft"}, {}, Kept(profiles=True)),
        ({"method": "cachecraft", "capture": False}, {}, Kept()),
        ({"method": "query"}, {}, Kept()),
        ({"method": "query:stored"}, {}, Kept(profiles=True)),
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
        query = {"tail": 1, "layers": "all", "factor": "none"}
        found = {"query": {"recompute_ratio": 0.1, "query": query}, "cachecraft": {"alpha": 0.5, "focus": True}}
        assert request.choice.parameters == found[method]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"chunks": [[1, 1]] * 1_000_000}, "1000000 chunks are named in a prompt of"),
        ({"promoted": [0] * 1_000_000}, "promoted names 1000000 chunks, and there are"),
    ],
    ids=["chunks", "promoted"],
)
def test_lists_that_are_too_long_are_refused_by_their_length(wrong, said):
    with pytest.raises(UsageError, match=said):
        read({"chunks": [[3, 6], [6, 8]], **wrong})
