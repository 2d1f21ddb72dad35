"""Requests that must be refused: the table, and what each refusal must say.

The served model has a vocabulary of 384 ids and a context of 2,048 tokens; the key is the edge's.
"""

import json
import math
from typing import Any, NamedTuple

from octavo.v1 import inference_pb2
from tests.e2e.edge import CHAT, KEY, MAX_BODY_BYTES, TEXT

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
VOCAB_SIZE, CONTEXT = 384, 2048
HI = [{"role": "user", "content": "hi"}]
Header = tuple[bytes, bytes]
AUTHORIZATION: Header = (b"Authorization", b"Bearer " + KEY.encode())
JSON_TYPE: Header = (b"Content-Type", b"application/json")


class HttpCase(NamedTuple):
    """`param`: the field that the error names (or a part of it), None = none."""

    name: str
    path: str
    body: bytes
    param: str | None = None
    status: int = 400
    code: str | None = None
    method: str = "POST"
    headers: tuple[Header, ...] = (AUTHORIZATION, JSON_TYPE)


class RawCase(NamedTuple):
    """Bytes that no client library would send."""

    name: str
    data: bytes
    status: int


class GrpcCase(NamedTuple):
    """A message for `method`, or bytes in place of one."""

    name: str
    message: Any
    param: str | None = None
    code: str = "INVALID_ARGUMENT"
    method: str = "Generate"
    metadata: tuple[tuple[str, str | bytes], ...] = (("authorization", f"Bearer {KEY}"),)


class Literal(str):
    """Stands in a body as it is, though it may be no JSON."""

    __slots__ = ()


def render(body: dict[str, Any]) -> bytes:
    """JSON of `body`; `Literal` values unquoted."""
    members = [
        f"{json.dumps(name)}:{value if isinstance(value, Literal) else json.dumps(value)}"
        for name, value in body.items()
    ]
    return ("{" + ",".join(members) + "}").encode()


def field(path: str, name: str, value: Any, param: str | None = "", **extra: Any) -> HttpCase:
    """A good body with one bad field; `param` "" = the field's own name."""
    good: dict[str, Any] = {
        CHAT: {"messages": HI},
        TEXT: {"prompt": "x"},
        TOKENIZE: {"prompt": "x"},
        DETOKENIZE: {"tokens": [65]},
    }[path]
    body = render({**good, **extra, name: value})
    shown = str(value)[:40]
    return HttpCase(f"{path} {name}={shown}", path, body, name if param == "" else param)


def both(name: str, *values: Any, param: str | None = "", **extra: Any) -> list[HttpCase]:
    return [field(path, name, value, param, **extra) for value in values for path in (CHAT, TEXT)]


NO_NUMBERS = (Literal("NaN"), Literal("Infinity"), Literal("-Infinity"))
HUGE = Literal("1" + "0" * 400)
ENDLESS = Literal("9" * 5000)

NUMBERS = [
    # What isn't JSON names no field: it was never read.
    *(
        case
        for name in ("temperature", "top_p", "seed")
        for case in both(name, *NO_NUMBERS, param=None)
    ),
    *both("temperature", "0.5", "NaN", True, [], {}, -0.1, 2.1, 1e6, Literal("1e999"), HUGE),
    *both("temperature", ENDLESS, param=None),
    *both("top_p", -0.1, 1.0000001, 7, "1", True, HUGE),
    *both("top_k", -2, 0.01, 1.5, 1e12, 2**31, "5", True, Literal("1e1"), HUGE),
    *both("min_p", -0.1, 2, "0", False, Literal("-1e999")),
    *both("seed", 2**63, 2**64, -(2**63) - 1, 1.5, "7", True, HUGE),
    *both("n", 0, -1, 1.5, 129, "2", True, 2**31),
    *both("max_tokens", -1, 0, 1.5, "5", True, 2**31, Literal("1e2"), HUGE),
    *both("max_tokens", CONTEXT, 2**31 - 1),
    *both("presence_penalty", 2.01, -2.01, "1", True),
    *both("frequency_penalty", 2.01, -3, [], True),
    *both("repetition_penalty", 0, -1, "1.1", True, HUGE),
    *both("min_tokens", -1, 1.5, "1"),
    *both("ignore_eos", 1, "true", []),
    *both("stream", 1, "yes", {}, []),
    field(CHAT, "max_completion_tokens", 0),
    field(CHAT, "max_completion_tokens", CONTEXT, "max_"),
    field(CHAT, "max_completion_tokens", 5, max_tokens=6),
    field(CHAT, "logprobs", 1),
    field(CHAT, "logprobs", "true"),
    field(CHAT, "top_logprobs", 21, logprobs=True),
    field(CHAT, "top_logprobs", -1, logprobs=True),
    field(CHAT, "top_logprobs", 2),
    field(CHAT, "top_logprobs", 2, logprobs=False),
    field(TEXT, "logprobs", 21),
    field(TEXT, "logprobs", -1),
    field(TEXT, "logprobs", True),
    field(TEXT, "logprobs", "5"),
]
IDS = [
    *(field(TEXT, "prompt", value) for value in (
        [-1], [[-1]], [VOCAB_SIZE], [2**31], [2**63], [1, "a"], [1.0], [[1], []], [True], [None],
        [1, None], [[1, 2], [3, VOCAB_SIZE]], [{}], [["a"]], [[[1]]], Literal("[1,NaN]"),
    ) if not isinstance(value, Literal)),
    field(TEXT, "prompt", Literal("[1,NaN]"), None),
    *both("logit_bias", {str(VOCAB_SIZE): 1}, {"-1": 1}, {"x": 1}, {"5": 101}, {"5": None}),
    *both("logit_bias", {"": 1}, {"5.0": 1}, {"٥": 1}, {"5": "1"}, [5], 5, "5"),
    *both("logit_bias", {str(i): 1 for i in range(20_000)}),
    *both("stop_token_ids", [VOCAB_SIZE], [-1], ["1"], [1.5], 5, [1] * 129, [True], {}),
    *both("allowed_token_ids", [VOCAB_SIZE], [-1], ["1"], 5, []),
    field(DETOKENIZE, "tokens", [VOCAB_SIZE]),
    field(DETOKENIZE, "tokens", [-1]),
    field(DETOKENIZE, "tokens", ["a"]),
    field(DETOKENIZE, "tokens", "abc"),
    field(DETOKENIZE, "tokens", None),
]  # fmt: skip
PROMPTS = [
    *(field(TEXT, "prompt", value) for value in ("", [""], ["a", ""], [], [[]], None, 5, {}, True)),
    field(TEXT, "prompt", ["a", 5]),
    field(TEXT, "prompt", ["a", None]),
    field(TEXT, "prompt", "a b " * CONTEXT),
    field(TEXT, "prompt", ["x", "a b " * CONTEXT]),
    field(TEXT, "prompt", [5] * CONTEXT),
    field(TEXT, "prompt", ["a"] * 1025),
    field(TEXT, "n", 100, prompt=["a"] * 1000),
    HttpCase("no prompt", TEXT, b"{}", "prompt"),
    HttpCase("prompt and messages", TOKENIZE, render({"prompt": "a", "messages": HI}), "prompt"),
    HttpCase("nothing to tokenize", TOKENIZE, b"{}", "prompt"),
    field(TOKENIZE, "prompt", 5),
    field(TOKENIZE, "prompt", ["a"]),
]
MESSAGES = [
    *(
        field(CHAT, "messages", value, param)
        for value, param in [
            ([], "messages"),
            (None, "messages"),
            ("hi", "messages"),
            ({"role": "user", "content": "x"}, "messages"),
            (["hi"], "messages[0]"),
            ([None], "messages[0]"),
            ([[]], "messages[0]"),
            ([{}], "messages[0]"),
            ([{"content": "x"}], "messages[0].role"),
            ([{"role": None, "content": "x"}], "messages[0].role"),
            ([{"role": "robot", "content": "x"}], "messages[0].role"),
            ([{"role": "User", "content": "x"}], "messages[0].role"),
            ([{"role": ["user"], "content": "x"}], "messages[0].role"),
            ([{"role": {"a": 1}, "content": "x"}], "messages[0].role"),
            ([*HI, {"role": 5, "content": "x"}], "messages[1].role"),
            ([{"role": "user"}], "messages[0].content"),
            ([{"role": "user", "content": None}], "messages[0].content"),
            ([{"role": "user", "content": 5}], "messages[0].content"),
            ([{"role": "user", "content": {}}], "messages[0].content"),
            ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
            ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
            ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
            (
                [{"role": "user", "content": [{"type": "text", "text": None}]}],
                "messages[0].content[0].text",
            ),
            (
                [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
                "messages[0].content[0]",
            ),
            (
                [{"role": "user", "content": [{"type": "input_audio"}]}],
                "messages[0].content[0]",
            ),
            ([{"role": "user", "content": [{"type": ["text"]}]}], "messages[0].content[0]"),
            ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
            ([{"role": "user", "content": "x" * 9000}], "messages"),
            (HI * 4097, "messages"),
        ]
    ),
]
FIELDS = [
    *both("stop", 5, {}, [5], ["a", None], [""], "", ["x"] * 17, "x" * 1025, [["x"]], True),
    *both("model", 5, ["m"], "m" * 300, True),
    *both("user", 5, "u" * 2000),
    *both("stream_options", {"include_usage": True}),
    *both("stream_options", True, [], "x", stream=True),
    *both("stream_options", {"include_usage": 1}, stream=True),
    *both("stream_options", {"include_usage": "yes"}, stream=True),
    *both("bad_words", "x", [5], [""], ["x"] * 5000, ["x" * 100_000]),
    *both("best_of", 3, n=1),
    *both("response_format", {"type": "json_object"}, {"type": "json_schema"}, "json", []),
    *both("guided_json", {}),
    *both("use_beam_search", True),
    *both("prompt_embeds", "AAAA"),
    *both("kv_transfer_params", {"a": 1}),
    field(CHAT, "tools", [{"type": "function", "function": {"name": "f"}}]),
    field(CHAT, "tools", "f"),
    field(CHAT, "tool_choice", "required"),
    field(CHAT, "functions", [{}]),
    field(CHAT, "modalities", ["text", "audio"]),
    field(CHAT, "audio", {"voice": "x"}),
    field(CHAT, "web_search_options", {}),
    field(TEXT, "suffix", "x"),
    field(TEXT, "echo", "yes"),
    field(TEXT, "truncate_prompt_tokens", "x"),
    field(CHAT, "add_generation_prompt", "x"),
    field(CHAT, "chat_template_kwargs", "x"),
    field(CHAT, "chat_template", 5),
    *both("cache_salt", 5),
    *both("priority", "high"),
]
BODIES = [
    HttpCase(f"{path} body {raw[:40]!a}", path, raw)
    for raw in (
        b"{:",
        b"",
        b"   ",
        b"[]",
        b'"x"',
        b"null",
        b"5",
        b"true",
        b"{} {}",
        b"{'a': 1}",
        b'{"a": 1,}',
        b'{"messages": ',
        b'{"prompt": "x"',
        b'{"prompt": "\x00"}',
        b'{"prompt": "a\nb"}',
        b'{"prompt": "\\x"}',
        b"\xff\xfe",
        b'{"prompt": "\xc3("}',
        b'{"prompt": "\xed\xa0\x80"}',
        '{"prompt": "hé", "messages": "hé"}'.encode("latin-1"),
        '\ufeff{"prompt": "x"}'.encode(),
        '{"prompt": "x"}'.encode("utf-16"),
        '{"prompt": "x"}'.encode("utf-32"),
        b'{"prompt": "\\ud83d", "messages": [{"role": "user", "content": "\\ud83d"}]}',
        b'{"\\ud83d": 1, "prompt": "x", "messages": []}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b"prompt=x&max_tokens=5",
        b"--x\r\nContent-Disposition: form-data\r\n\r\n{}\r\n--x--",
        b"<prompt>x</prompt>",
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
    )
    for path in (CHAT, TEXT)
] + [
    HttpCase("key twice", TEXT, b'{"prompt": "x", "prompt": "y"}', "prompt"),
    HttpCase("key twice in a message", CHAT, b'{"messages":[{"role":"user","role":"x"}]}', "role"),
    HttpCase("tokenize: no JSON", TOKENIZE, b"{"),
    HttpCase("detokenize: no JSON", DETOKENIZE, b"{"),
]


def with_header(name: str, header: bytes, value: bytes) -> HttpCase:
    """A good body under a header that makes no sense of it."""
    headers = [AUTHORIZATION, (header, value)]
    if header != JSON_TYPE[0]:
        headers.append(JSON_TYPE)
    return HttpCase(name, TEXT, b'{"prompt": "x"}', header.decode(), headers=tuple(headers))


def key_case(name: str, *values: bytes) -> HttpCase:
    headers = (*((b"Authorization", value) for value in values), JSON_TYPE)
    body = b'{"prompt": "x"}'
    return HttpCase(name, TEXT, body, status=401, code="invalid_api_key", headers=headers)


HEADERS = [
    with_header("text/plain", b"Content-Type", b"text/plain"),
    with_header("form", b"Content-Type", b"application/x-www-form-urlencoded"),
    with_header("multipart", b"Content-Type", b"multipart/form-data; boundary=x"),
    with_header("long type", b"Content-Type", b"x" * 5000),
    with_header("broken type", b"Content-Type", b"\xff\xfe"),
    with_header("gzip", b"Content-Encoding", b"gzip"),
    with_header("br", b"Content-Encoding", b"br, gzip"),
    with_header("long key", b"Idempotency-Key", b"k" * 300),
    key_case("no key"),
    key_case("bare key", KEY.encode()),
    key_case("scheme only", b"Bearer"),
    key_case("key and more", b"Bearer " + KEY.encode() + b"x"),
    key_case("key cut", b"Bearer " + KEY.encode()[:-1]),
    key_case("broken byte", b"Bearer \xff"),
    key_case("basic", b"Basic azE6"),
    key_case("twice", b"Bearer " + KEY.encode(), b"Bearer " + KEY.encode()),
    key_case("right and wrong", b"Bearer " + KEY.encode(), b"Bearer x"),
    key_case("long", b"Bearer " + b"k" * 10_000),
    key_case("tenant", b"Bearer " + KEY.encode() + b":tenant"),
]
NO_MODEL = ("model", 404, "model_not_found")
ROUTES = [
    HttpCase("other model", TEXT, render({"prompt": "x", "model": "gpt-4"}), *NO_MODEL),
    HttpCase("not here", CHAT, render({"messages": HI, "model": "é" * 99}), *NO_MODEL),
    HttpCase("no such", TOKENIZE, render({"prompt": "x", "model": "y"}), *NO_MODEL),
    HttpCase("unknown route", "/v1/embeddings", b"{}", None, 404, "not_found"),
    HttpCase("unknown route, broken", "/v1/%ff%00/../x", b"{}", None, 404, "not_found"),
    HttpCase("slash at the end", TEXT + "/", b"{}", None, 404, "not_found"),
    HttpCase("upper case", TEXT.upper(), b"{}", None, 404, "not_found"),
    HttpCase("unknown model card", "/v1/models/nope", b"", *NO_MODEL, "GET"),
    HttpCase("GET", CHAT, b"", None, 405, "method_not_allowed", "GET"),
    HttpCase("PUT", TEXT, b"{}", None, 405, "method_not_allowed", "PUT"),
    HttpCase("DELETE", "/v1/models", b"", None, 405, "method_not_allowed", "DELETE"),
    HttpCase("PATCH", TOKENIZE, b"{}", None, 405, "method_not_allowed", "PATCH"),
    HttpCase("too large", TEXT, b" " * (MAX_BODY_BYTES + 1), None, 413, "request_too_large"),
    HttpCase(
        "long header", "/v1/models", b"", None, 431, "headers_too_large", "GET",
        (AUTHORIZATION, (b"X-Long", b"x" * 70_000)),
    ),
    HttpCase(
        "many headers", "/v1/models", b"", None, 431, "headers_too_large", "GET",
        (AUTHORIZATION, *((b"X-%d" % i, b"x" * 50) for i in range(1500))),
    ),
]  # fmt: skip
HTTP_CASES: list[HttpCase] = [
    *NUMBERS, *IDS, *PROMPTS, *MESSAGES, *FIELDS, *BODIES, *HEADERS, *ROUTES
]  # fmt: skip

_KEY_LINE = b"%s: %s\r\n" % AUTHORIZATION
_POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + _KEY_LINE
_CHUNKED = _POST + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
RAW_CASES = [
    RawCase("a TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    RawCase("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    RawCase("a word", b"hello\r\n\r\n", 400),
    RawCase("two lengths", _POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}", 400),
    RawCase("negative length", _POST + b"Content-Length: -2\r\n\r\n{}", 400),
    RawCase("endless length", _POST + b"Content-Length: " + b"9" * 99 + b"\r\n\r\n{}", 400),
    RawCase("length of terabytes", _POST + b"Content-Length: 9999999999999\r\n\r\n{}", 413),
    RawCase("length and chunks", _CHUNKED[:-2] + b"Content-Length: 2\r\n\r\n0\r\n\r\n", 400),
    RawCase("chunk of no size", _CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n", 400),
    RawCase("chunks of broken JSON", _CHUNKED + b"1\r\n{\r\n1\r\n:\r\n0\r\n\r\n", 400),
    RawCase("empty chunked body", _CHUNKED + b"0\r\n\r\n", 400),
    RawCase("NUL in a header", _POST + b"X: a\x00b\r\nContent-Length: 2\r\n\r\n{}", 400),
    RawCase("line end in an id", _POST + b"X-Request-Id: a\rb\r\n\r\n", 400),
    RawCase("long URL", b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    RawCase("long query", b"GET /livez?" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    RawCase("line without end", b"GET /" + b"x" * 70_000, 414),
    RawCase("header without end", b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000, 431),
    RawCase("CONNECT", b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    RawCase("TRACE", b"TRACE /v1/models HTTP/1.1\r\nHost: x\r\n" + _KEY_LINE + b"\r\n", 405),
]  # fmt: skip

Generate = inference_pb2.InferenceGenerateRequest
Tokenize = inference_pb2.InferenceTokenizeRequest
Detokenize = inference_pb2.InferenceDetokenizeRequest


def grpc_ids(*ids: int) -> Any:
    return Generate(token_ids=inference_pb2.TokenIds(token_ids=ids))


def grpc_chat(*messages: tuple[str, str]) -> Any:
    items = [inference_pb2.ChatMessage(role=role, content=text) for role, text in messages]
    return Generate(chat=inference_pb2.ChatMessages(messages=items))


def bad(
    field: str, value: Any, *, named: str | None = None, code: str = "INVALID_ARGUMENT"
) -> GrpcCase:
    message = Generate(**{"text": "x", field: value})
    return GrpcCase(f"{field}={str(value)[:30]}", message, named or field, code)


def grpc_key(name: str, *values: str) -> GrpcCase:
    metadata = tuple(("authorization", value) for value in values)
    return GrpcCase(name, Generate(text="x"), None, "UNAUTHENTICATED", metadata=metadata)


GRPC_CASES = [
    GrpcCase("nothing", Generate()),
    GrpcCase("empty text", Generate(text=""), "prompt"),
    GrpcCase("no ids", grpc_ids(), "prompt"),
    GrpcCase("id past the vocabulary", grpc_ids(1, VOCAB_SIZE), "token_ids[1]"),
    GrpcCase("largest id", grpc_ids(2**32 - 1), "token_ids[0]"),
    GrpcCase("no messages", grpc_chat(), "messages"),
    GrpcCase("unknown role", grpc_chat(("user", "x"), ("robot", "x")), "messages[1].role"),
    GrpcCase("no role", grpc_chat(("", "x")), "messages[0].role"),
    GrpcCase("long text", Generate(text="a b " * CONTEXT), "prompt"),
    GrpcCase("long ids", grpc_ids(*[5] * CONTEXT), "prompt"),
    *(bad("temperature", value) for value in (math.nan, math.inf, -math.inf, -0.1, 2.5, 3e38)),
    *(bad("top_p", value) for value in (math.nan, -0.1, 1.5, math.inf)),
    *(bad("top_k", value) for value in (-2, -(2**31))),
    *(bad("min_p", value) for value in (math.nan, -1.0, 2.0)),
    *(bad("max_tokens", value) for value in (0, CONTEXT, 2**31, 2**32 - 1)),
    *(bad("n", value) for value in (0, 129, 2**32 - 1)),
    *(bad("logprobs", value) for value in (21, 2**32 - 1)),
    *(bad("stop", value) for value in ([""], ["x"] * 17, ["x" * 1025])),
    *(bad("stop_token_ids", value) for value in ([VOCAB_SIZE], [2**32 - 1], [1] * 129)),
    bad("idempotency_key", "k" * 300, named="Idempotency-Key"),
    bad("model", "gpt-4", code="NOT_FOUND"),
    GrpcCase("tokenize nothing", Tokenize(), method="Tokenize"),
    GrpcCase("not here", Tokenize(text="x", model="y"), "model", "NOT_FOUND", "Tokenize"),
    GrpcCase("detokenize", Detokenize(token_ids=[VOCAB_SIZE]), "token_ids[0]", method="Detokenize"),
    grpc_key("no key"),
    grpc_key("wrong key", "Bearer x"),
    grpc_key("bare key", KEY),
    grpc_key("key twice", f"Bearer {KEY}", f"Bearer {KEY}"),
    GrpcCase("no key, tokenize", Tokenize(text="x"), None, "UNAUTHENTICATED", "Tokenize", ()),
    GrpcCase("too large", Generate(text="x" * (MAX_BODY_BYTES + 1)), None, "RESOURCE_EXHAUSTED"),
    GrpcCase("no message", b"\xff\xff\xff"),
    GrpcCase("cut message", Generate(text="hello").SerializeToString()[:-1]),
    GrpcCase("broken UTF-8", b"\x12\x02\xc3\x28"),
    GrpcCase("broken UTF-8 to tokenize", b"\x12\x02\xc3\x28", method="Tokenize"),
    GrpcCase("unknown method", b"", None, "UNIMPLEMENTED", "Nope"),
]
