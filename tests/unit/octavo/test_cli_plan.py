"""octavo plan: what fits and what can't be faster, on cards of every size; what it prints."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from octavo.cli import plan_sizes
from octavo.cli.gpus import GPUS, Gpu, find_gpu
from octavo.cli.main import main as octavo
from octavo.cli.plan_sizes import CONTEXT_BYTES, CardPlan, Wish
from octavo.cli.workloads import load_shapes
from octavo.errors import ConfigurationError
from octavo_worker.footprint import keeps_copies
from tests.unit.gpu_worker.quantized_checkpoints import Recipe, save_quantized

GIB = 1 << 30


@dataclass(frozen=True)
class EightB:
    """Of an 8B model in bfloat16."""

    weight_bytes: int = 16 * 10**9
    copies_bytes: int = 0
    read_bytes: int = 15 * 10**9
    read_bytes_of_one: int = 15 * 10**9
    read_bytes_with_copies: int = 15 * 10**9
    most_rows_of_codes: int = 64
    params_per_token: int = 7_500_000_000
    num_heads: int = 32
    num_kv_heads: int = 8
    kv_bytes_per_token: int = 131_072
    max_model_len: int = 131_072

    def scratch_bytes(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        return max_num_seqs * 2_000_000 + max_num_batched_tokens * 150_000 + GIB // 2


def make_plan(sizes: EightB, gpu: Gpu, wish: Wish) -> CardPlan:
    return plan_sizes.make_plan(sizes, gpu, wish, keeps_copies)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_everything_fits_into_what_may_be_used(gpu: Gpu) -> None:
    plan = make_plan(EightB(), gpu, Wish())
    taken = plan.weight_bytes + plan.scratch_bytes + plan.kv_cache_bytes + CONTEXT_BYTES
    assert taken <= plan.usable_bytes <= 0.9 * gpu.memory_bytes
    assert plan.num_kv_tokens == (plan.num_kv_blocks - 1) * 16
    assert plan.kv_cache_bytes == plan.num_kv_blocks * 16 * plan.kv_bytes_per_token
    assert plan.max_num_seqs <= max(plan.num_kv_tokens // 2048, 1)
    assert plan.max_model_len == min(131_072, plan.num_kv_tokens)
    assert plan.limits is not None
    # Reading 15 GB for each token is the limit of one sequence, and KV comes on top.
    assert 0.9 < plan.limits.one_sequence * 15e9 / gpu.read_bytes_per_s < 1
    assert plan.limits.one_sequence < plan.limits.all_sequences < plan.limits.prefill


def test_every_card_is_found_however_spelled() -> None:
    assert find_gpu("rtx 4090") is find_gpu("RTX-4090") is find_gpu("RTX4090")
    assert find_gpu("h100 pcie").read_bytes_per_s < find_gpu("h100").read_bytes_per_s
    with pytest.raises(ConfigurationError, match=r"'h300'.*H200.*--gpu-memory"):
        find_gpu("h300")


def test_cards_are_added_until_it_fits() -> None:
    small = Gpu("small", 16 * GIB, 1e12, 100e12)
    plan = make_plan(EightB(), small, Wish())
    assert plan.tensor_parallel == 2
    assert plan.weight_bytes == 8 * 10**9
    assert plan.kv_bytes_per_token == 131_072 // 2
    one = make_plan(EightB(), replace(small, memory_bytes=32 * GIB), Wish())
    assert one.tensor_parallel == 1
    assert make_plan(EightB(), small, Wish(tensor_parallel=4)).tensor_parallel == 4
    with pytest.raises(ConfigurationError, match=r"doesn't fit on 1 x small.*16\.0 GB for weights"):
        make_plan(EightB(), small, Wish(tensor_parallel=1))


def test_heads_limit_the_cards() -> None:
    """KV heads are repeated where there are fewer than cards; 12 heads can't go on 8."""
    gpu = find_gpu("L4")
    repeated = make_plan(EightB(num_kv_heads=2), gpu, Wish(tensor_parallel=8))
    assert repeated.kv_bytes_per_token == 131_072 // 2
    with pytest.raises(ConfigurationError, match="doesn't fit"):
        make_plan(EightB(num_heads=12, weight_bytes=10**12), gpu, Wish())


def test_no_more_blocks_than_rows_can_fill() -> None:
    short = EightB(max_model_len=100)
    plan = make_plan(short, find_gpu("H200"), Wish(max_num_seqs=10))
    assert plan.num_kv_blocks == 10 * 7 + 1
    assert plan.max_num_seqs == 10


def test_copies_of_4_bit_layers_take_their_part() -> None:
    packed = EightB(weight_bytes=6 * 10**9, copies_bytes=14 * 10**9)
    large, small = find_gpu("H200"), find_gpu("A100-80")
    never = make_plan(packed, large, Wish(max_num_seqs=256, dequantized_copies="never"))
    auto = make_plan(packed, large, Wish(max_num_seqs=256))
    assert (never.copies_bytes, auto.copies_bytes) == (0, 14 * 10**9)
    per_block = 16 * auto.kv_bytes_per_token
    lost = never.kv_cache_bytes - auto.kv_cache_bytes
    assert abs(lost - auto.copies_bytes) <= per_block
    # More than a sixth of what the smaller card leaves: only if they must be.
    assert make_plan(packed, small, Wish(tensor_parallel=1)).copies_bytes == 0
    must = Wish(dequantized_copies="always")
    assert make_plan(packed, small, must).copies_bytes == 14 * 10**9
    assert make_plan(packed, large, Wish(tensor_parallel=2)).copies_bytes == 7 * 10**9
    tiny = Gpu("tiny", 20 * GIB, 1e12, 100e12)
    with pytest.raises(ConfigurationError, match=r"6\.0 GB for weights, 14\.0 GB for copies"):
        make_plan(packed, tiny, replace(must, tensor_parallel=1))


def test_copies_are_what_many_rows_read() -> None:
    few, many, one = 64, 65, 1
    sizes = EightB(
        weight_bytes=6 * 10**9,
        copies_bytes=14 * 10**9,
        read_bytes=5 * 10**9,
        read_bytes_of_one=5 * 10**9,
    )
    gpu = find_gpu("H200")

    def read_bytes(rows: int, copies: str) -> float:
        """What a step's time is, less what KV takes of it."""
        wish = Wish(max_num_seqs=rows, dequantized_copies=copies)
        limits = make_plan(sizes, gpu, wish).limits
        assert limits is not None
        step_s = rows / limits.all_sequences
        return step_s * gpu.read_bytes_per_s - rows * 2048 * sizes.kv_bytes_per_token

    for copies in ("auto", "always"):
        read = [read_bytes(rows, copies) for rows in (one, few, many)]
        assert read == pytest.approx([5e9, 5e9, 15e9])
    assert read_bytes(many, "never") == pytest.approx(5e9)


def test_experts_are_read_as_they_are_needed() -> None:
    gpu = find_gpu("H200")
    dense, sparse = EightB(), EightB(read_bytes_of_one=3 * 10**9, params_per_token=1_500_000_000)
    plans = [make_plan(sizes, gpu, Wish()) for sizes in (dense, sparse)]
    assert plans[0].limits is not None
    assert plans[1].limits is not None
    assert plans[1].limits.one_sequence > 4 * plans[0].limits.one_sequence
    # A full batch reads them all, whatever it computes.
    assert plans[1].limits.all_sequences < 1.5 * plans[0].limits.all_sequences


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config.json and nothing else."""
    folder = tmp_path_factory.mktemp("shape")
    config = {"dtype": "bfloat16", **load_shapes()["tiny"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_json(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo(["plan", str(tiny), "--gpu", "h200", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["model"]["kv_bytes_per_token"] == 2 * 8 * 1 * 32 * 2
    assert record["gpu"]["name"] == "H200"
    plan = record["plan"]
    assert plan["kv_bytes_per_token"] == record["model"]["kv_bytes_per_token"]
    assert record["settings"] == {
        "max_num_seqs": plan["max_num_seqs"],
        "max_num_batched_tokens": 8192,
        "kv_cache_memory": f"{plan['kv_cache_bytes'] // (1 << 20)}MiB",
    }


def test_text(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--gpu-memory", "2 GiB", "--context-tokens", "512", "--max-num-seqs", "4"]
    assert octavo(["plan", str(tiny), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tiny.name} (LlamaForCausalLM, native) on card"
    text = "\n".join(lines)
    assert "2.15 GB, 1.93 GB to be used" in text
    assert "1,024 bytes a token" in text
    assert "2,049 blocks = 32,768 tokens" in text
    assert "4.0 of 8,192 tokens, 64.0 of 512" in text
    assert "tokens/s" not in text  # how fast that card is nobody said
    assert "--max-num-seqs 4 " in text


def test_what_was_asked_for_is_among_the_settings(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"dtype": "float16", "quantization": "fp8", "max_model_len": 256, "block_size": 32}
    asked |= {"kv_cache_dtype": "fp8"}
    flags = [text for key, value in asked.items() for text in (_flag(key), str(value))]
    assert octavo(["plan", str(tiny), "--gpu", "L4", "--json", *flags]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert asked.items() <= settings.items()


def test_copies_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the worker is told to keep them beside the cache that was sized with them."""
    save_quantized(tmp_path, Recipe("awq"))
    arguments = ["plan", str(tmp_path), "--gpu", "H200", "--dtype", "float16"]
    assert octavo(arguments) == 0
    text = capsys.readouterr().out
    assert "16-bit copies     0.00 GB (of 4-bit layers, for steps of many rows)" in text
    assert "--dequantized-copies always" in text
    assert octavo([*arguments, "--dequantized-copies", "never"]) == 0
    text = capsys.readouterr().out
    assert "16-bit copies     none; of 4-bit layers they'd take 0.00 GB" in text
    assert "--dequantized-copies never" in text


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give --gpu NAME or --gpu-memory SIZE"),
        (["--gpu", "h300"], "--gpu 'h300' isn't known"),
        (["--gpu-memory", "big"], "--gpu-memory 'big' is no card's; write e.g. 24GiB"),
        (["--gpu-memory", "24"], "--gpu-memory '24' is no card's; write e.g. 24GiB"),
        (["--gpu-memory", "1GiB"], "doesn't fit on 4 x card"),
        (["--gpu", "L4", "--max-model-len", "9000"], "OCTAVO_MAX_MODEL_LEN=9000"),
    ],
)
def test_mistakes(
    arguments: list[str], reason: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo(["plan", str(tiny), *arguments]) == 2
    assert reason in capsys.readouterr().err
