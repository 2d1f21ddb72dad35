"""octavo.cli.workloads and model_shapes: fixed requests, and models that need no download."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from octavo.cli.model_shapes import ensure_shape_folder
from octavo.cli.workloads import load_shapes, load_workloads, make_requests


def test_requests_are_fixed_and_follow_the_workload() -> None:
    workloads = load_workloads()
    assert set(workloads) == {"bs1", "bs8", "decode128", "mixed", "prefill"}
    mixed = make_requests(workloads["mixed"], 128256)
    assert mixed == make_requests(workloads["mixed"], 128256)
    assert len(mixed) == 256
    assert all(100 <= len(item.token_ids) <= 1024 for item in mixed)
    assert all(100 <= item.num_output_tokens <= 1024 for item in mixed)
    ids = [token_id for item in mixed for token_id in item.token_ids]
    assert (min(ids), max(ids)) == (10, 29_999)
    # The generator's order: prompt length, output length, then the ids.
    source = random.Random(0)
    lengths = (source.randint(100, 1024), source.randint(100, 1024))
    assert (len(mixed[0].token_ids), mixed[0].num_output_tokens) == lengths
    assert mixed[0].token_ids[0] == source.randrange(10, 30_000)
    small = make_requests(workloads["mixed"], 300)
    assert max(token_id for item in small for token_id in item.token_ids) < 300


def test_scaling_shrinks_requests_and_lengths() -> None:
    scaled = load_workloads()["mixed"].scaled(0.1)
    assert (scaled.num_requests, scaled.prompt_tokens, scaled.output_tokens) == (
        26,
        (10, 102),
        (10, 102),
    )
    tiny = load_workloads()["prefill"].scaled(0.001)
    assert (tiny.num_requests, tiny.prompt_tokens, tiny.output_tokens) == (1, (4, 4), (1, 1))
    runs = {name: workload.num_runs for name, workload in load_workloads().items()}
    assert runs == {"bs1": 2, "bs8": 2, "decode128": 2, "mixed": 1, "prefill": 2}


def test_shapes_become_folders_with_a_whole_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    config = {**load_shapes()["llama2-7b"], "vocab_size": 5000}
    folder = ensure_shape_folder("small", config)
    assert ensure_shape_folder("small", config) == folder
    assert [path.name for path in (tmp_path / "shapes").iterdir()] == ["small"]
    written = json.loads((folder / "config.json").read_text())
    assert (written["dtype"], written["hidden_size"]) == ("bfloat16", 4096)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 5000
    text = "héllo\n 你好"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    words = [tokenizer.decode([token_id]) for token_id in range(259, 5000)]
    assert len(set(words)) == len(words)
    assert all(word.startswith(" ") for word in words)
