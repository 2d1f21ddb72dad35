"""What `octavo bench serve` sends and when: lengths, arrivals, traces, prompts."""

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.serve_load import Arrival, Lengths, PromptMaker, make_load, parse_lengths
from octavo.cli.serve_options import parse_serve_options
from octavo.cli.serve_trace import TraceEntry, load_trace
from octavo.cli.sse_reader import EventReader
from octavo.errors import ConfigurationError

MOONCAKE = (
    '{"timestamp": 3052, "input_length": 700, "output_length": 52, "hash_ids": [46, 47]}\n'
    '{"timestamp": 27, "input_length": 6955, "output_length": 0, "hash_ids": [46]}\n\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)


def test_lengths_are_what_their_text_says() -> None:
    source = random.Random(1)
    assert parse_lengths("--x", "512") == Lengths(512, 512)
    uniform = {parse_lengths("--x", "3:5").draw(source) for _ in range(100)}
    assert uniform == {3, 4, 5}
    normal = [parse_lengths("--x", "100~20").draw(source) for _ in range(2000)]
    assert 97 < sum(normal) / len(normal) < 103
    assert min(normal) >= 1
    assert max(normal) <= 180
    assert min(Lengths(1, 9, 1.0, 4.0).draw(source) for _ in range(50)) == 1
    for wrong in ("", "0", "x", "5:3", "1:2:3", "10~0", "0~3", "1~2~3", "inf~1", "-1"):
        with pytest.raises(ConfigurationError, match="--x"):
            parse_lengths("--x", wrong)


def test_arrivals_are_a_poisson_process_and_the_same_for_a_seed() -> None:
    lengths = Lengths(1, 1000)
    load = list(make_load(4000, lengths, lengths, 10.0, seed=3))
    assert load == list(make_load(4000, lengths, lengths, 10.0, seed=3))
    assert load != list(make_load(4000, lengths, lengths, 10.0, seed=4))
    times = [arrival.due_s or 0.0 for arrival in load]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.05)
    # Exponential: as far spread as they are long.
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread == pytest.approx(mean, rel=0.1)
    # Another rate: the same requests.
    slower = make_load(4000, lengths, lengths, 1.0, seed=3)
    assert [a.num_prompt_tokens for a in slower] == [a.num_prompt_tokens for a in load]
    closed = make_load(4000, lengths, lengths, None, seed=3)
    assert [a.num_output_tokens for a in closed] == [a.num_output_tokens for a in load]
    assert {a.due_s for a in make_load(9, lengths, lengths, float("inf"), 0)} == {0.0}
    endless = make_load(None, lengths, lengths, None, seed=3)
    assert [a.due_s for a in itertools.islice(endless, 5000)] == [None] * 5000


def test_traces_of_both_kinds(tmp_path: Path) -> None:
    mooncake = tmp_path / "conversation.jsonl"
    mooncake.write_text(MOONCAKE)
    assert load_trace(mooncake, speed=2.0) == [
        TraceEntry(0.0, 6955, 1, (46,)),
        TraceEntry(pytest.approx(3.025 / 2), 700, 52, (46, 47)),
    ]
    azure = tmp_path / "azure.csv"
    azure.write_text(AZURE)
    assert load_trace(azure) == [
        TraceEntry(0.0, 374, 44),
        TraceEntry(pytest.approx(4.314579), 396, 109),
    ]
    azure.write_text("timestamp,input_length,output_length\n7.5,1,2\n9,3,4\n")
    assert load_trace(azure) == [TraceEntry(0.0, 1, 2), TraceEntry(1.5, 3, 4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests in it"),
        ("timestamp,input_length\n1,2\n", "line 2: no output_length or"),
        ("timestamp,input_length,output_length\n1,x,2\n", "line 2: invalid literal"),
        ("timestamp,input_length,output_length\nlate,1,2\n", "line 2: Invalid isoformat"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "line 1: lengths must"),
        ('{"timestamp": 1}\n', "line 1: no input_length or"),
        ('{"timestamp": 1\n', "line 1: "),
        ("{}\n[1]\n", "line 1: no timestamp"),
    ],
)
def test_a_broken_trace_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match="--trace ") as error:
        load_trace(file)
    assert message in error.value.message


def test_prompts_have_their_lengths_and_share_only_what_a_trace_shares() -> None:
    maker = PromptMaker(seed=5, is_words=False, vocab_size=300)
    first = maker.prompt(Arrival(0, None, 600, 1))
    assert len(first) == 600
    assert set(first) < set(range(10, 300))
    assert maker.prompt(Arrival(0, None, 600, 1)) == first
    assert maker.prompt(Arrival(1, None, 600, 1))[:20] != first[:20]
    one = maker.prompt(Arrival(2, None, 1100, 1, (7, 8)))
    other = maker.prompt(Arrival(3, None, 700, 1, (7, 9)))
    assert one[:512] == other[:512]
    assert one[512:700] != other[512:700]
    assert (len(one), len(other)) == (1100, 700)
    # 1.5 tokens a word and 30 of a template.
    words = PromptMaker(5, is_words=True, vocab_size=300, tokens_per_word=1.5, extra_tokens=30)
    assert len(words.prompt(Arrival(0, None, 180, 1)).split()) == 100
    assert words.prompt(Arrival(0, None, 3, 1)).split()[1:] == []


@given(
    st.lists(st.sampled_from([b"x", b"", b"long " * 9]), max_size=6),
    st.integers(1, 30),
    st.integers(1, 30),
    st.booleans(),
)
def test_events_survive_every_cut(
    payloads: list[bytes], chunk_bytes: int, read_bytes: int, is_chunked: bool
) -> None:
    body = b"".join(b": note\r\nevent: e\ndata: %s\n\n" % payload for payload in payloads)
    head = b"http/1.1 200 ok\r\n"
    if is_chunked:
        head += b"transfer-encoding: chunked\r\n"
        parts = [body[at : at + chunk_bytes] for at in range(0, len(body), chunk_bytes)]
        body = b"".join(b"%X;ext=1\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    reader = EventReader(head)
    found: list[bytes] = []
    for at in range(0, len(body), read_bytes):
        found += reader.feed(body[at : at + read_bytes])
    assert found == [payload.strip() for payload in payloads]


def test_broken_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        EventReader(b"transfer-encoding: chunked").feed(b"zz\r\ndata: x\n\n")


def test_flags_become_options(tmp_path: Path) -> None:
    options = parse_serve_options([])
    assert (options.concurrency, options.num_requests, options.rate) == (8, 100, None)
    assert options.servers == (("http://localhost:8000", "http://localhost:8000"),)
    assert options.request_fields == {"temperature": 0.0}
    assert options.arrivals == "8 clients"
    flags = ["--rate", "2.5", "--duration", "9", "--sampled", "--ignore-eos"]
    flags += ["--extra-body", '{"top_k": 4, "temperature": 0.5}']
    options = parse_serve_options(flags)
    assert (options.concurrency, options.num_requests, options.duration_s) == (None, None, 9.0)
    assert options.request_fields == {
        **{"temperature": 0.5, "top_p": 0.95, "ignore_eos": True, "top_k": 4}
    }
    assert options.arrivals == "poisson 2.5/s"
    trace = tmp_path / "t.csv"
    trace.write_text(AZURE)
    options = parse_serve_options(["--trace", str(trace), "--num-requests", "1"])
    assert list(options.load()) == [Arrival(0, 0.0, 374, 44)]
    assert (options.arrivals, options.concurrency) == ("trace t.csv", None)
    all_at_once = parse_serve_options(["--rate", "inf", "--num-requests", "3"])
    assert all_at_once.arrivals == "all at once"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "0"], "--rate 0.0: must be above 0"),
        (["--rate", "nan"], "--rate nan: must be above 0"),
        (["--rate", "inf", "--duration", "3"], "say with --num-requests how many"),
        (["--concurrency", "-1"], "--concurrency -1: must be above 0"),
        (["--slo-ttft-ms", "0"], "--slo-ttft-ms 0.0: must be above 0"),
        (["--vocab-size", "5"], "--vocab-size 5: must be at least 100"),
        (["--url", "h", "--url", "h"], "--url h twice: name them"),
        (["--url", "ftp://h"], "--url 'ftp://h': must be like http://host:port"),
        (["--extra-body", "[]"], "--extra-body '[]': must be a JSON object"),
        (["--extra-body", "{"], "--extra-body '{': "),
        (["--trace", "/absent.csv"], "--trace /absent.csv: "),
        (["--prompt-tokens", "0"], "--prompt-tokens '0': must be"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_serve_options(flags)
    assert message in error.value.message


def test_a_load_comes_from_one_place_only() -> None:
    with pytest.raises(SystemExit):
        parse_serve_options(["--rate", "1", "--concurrency", "2"])
