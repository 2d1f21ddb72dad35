"""`octavo plan MODEL --gpu H200`: what fits, how fast it could be, and settings to start with.

Reads config.json and the headers of safetensors; loads no tensor and needs no card. The sizes are
the worker's own (`octavo_worker.footprint`, loaded by name), the arithmetic is `plan_sizes`'.
Entry point: `main`.
"""

import argparse
import dataclasses
import importlib
import json
from typing import Any

from octavo.cli.gpus import GPUS, Gpu, find_gpu
from octavo.cli.plan_sizes import CardPlan, Wish, make_plan
from octavo.errors import ConfigurationError
from octavo.hub import model_name_of, resolve_model

_UTILIZATION = 0.9


def main(argv: list[str] | None = None) -> int:
    """Print the plan, for people or as JSON. Raises ConfigurationError for what can't be."""
    arguments = _parser().parse_args(argv)
    gpu = _gpu(arguments)
    folder = resolve_model(arguments.model, arguments.revision or None, weights=False)
    worker = importlib.import_module("octavo_worker.footprint")
    footprint = worker.footprint(
        folder,
        impl=arguments.model_impl,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
    )
    wish = Wish(
        tensor_parallel=arguments.tensor_parallel,
        max_num_seqs=arguments.max_num_seqs,
        context_tokens=arguments.context_tokens,
        memory_utilization=arguments.memory_utilization,
        block_size=arguments.block_size,
        dequantized_copies=arguments.dequantized_copies,
    )
    plan = make_plan(footprint, gpu, wish, worker.keeps_copies)
    settings = _settings(arguments, footprint, plan)
    if arguments.json:
        print(json.dumps(_record(footprint, gpu, plan, settings)))
        return 0
    lines = _lines(model_name_of(arguments.model), footprint, gpu, plan, wish)
    flags = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in settings.items())
    print("\n".join([*lines, _line("settings", flags)]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo plan",
        description="What a model takes on a card, what fits beside it, and settings to start "
        "with. Reads configuration and headers only.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="Hugging Face id, folder, or 'demo'")
    add("--gpu", default="", help=f"one of {', '.join(gpu.name for gpu in GPUS)}")
    add("--gpu-memory", default="", metavar="SIZE", help="of another card, e.g. 24GiB")
    add("--revision", default=None, help="revision of the Hugging Face id")
    add("--tensor-parallel", type=_count, default=0, metavar="N", help="cards; 0 = the least")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    add("--model-impl", default="auto", choices=("auto", "native", "transformers"))
    add("--quantization", default="auto", choices=("auto", "fp8"))
    add("--kv-cache-dtype", default="auto", choices=("auto", "fp8"))
    add("--dequantized-copies", default="auto", choices=("auto", "always", "never"))
    add("--max-model-len", type=_count, default=0, metavar="LEN", help="0 = the model's")
    add("--max-num-seqs", type=_count, default=0, metavar="SEQS", help="0 = suggest")
    add("--context-tokens", type=_some, default=2048, metavar="TOKENS", help="typical [2048]")
    add("--memory-utilization", type=_share, default=_UTILIZATION, help=f"[{_UTILIZATION}]")
    add("--block-size", type=int, default=16, choices=(16, 32))
    add("--json", action="store_true", help="one JSON object")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value}: must not be negative")
    return value


def _some(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 0.99:
        raise argparse.ArgumentTypeError(f"{value}: must be between 0.05 and 0.99")
    return value


def _gpu(arguments: argparse.Namespace) -> Gpu:
    if not arguments.gpu and not arguments.gpu_memory:
        raise ConfigurationError("give --gpu NAME or --gpu-memory SIZE", param="gpu")
    gpu = find_gpu(arguments.gpu) if arguments.gpu else Gpu("card", 0)
    if arguments.gpu_memory:
        parse_bytes = importlib.import_module("octavo_worker.kv_cache").parse_bytes
        try:
            memory_bytes = parse_bytes(arguments.gpu_memory, "gpu_memory")
        except ConfigurationError:
            memory_bytes = 0
        if memory_bytes < 1 << 30:  # often a number without its unit
            message = f"--gpu-memory {arguments.gpu_memory!r} is no card's; write e.g. 24GiB"
            raise ConfigurationError(message, param="gpu_memory")
        gpu = dataclasses.replace(gpu, memory_bytes=memory_bytes)
    return gpu


def _record(footprint: Any, gpu: Gpu, plan: CardPlan, settings: dict[str, Any]) -> dict[str, Any]:
    model = {
        field.name: getattr(footprint, field.name)
        for field in dataclasses.fields(footprint)
        if field.name != "shape"
    }
    return {
        "model": model,
        "gpu": dataclasses.asdict(gpu),
        "plan": dataclasses.asdict(plan),
        "settings": settings,
    }


def _settings(arguments: argparse.Namespace, footprint: Any, plan: CardPlan) -> dict[str, Any]:
    """Flags of `octavo serve` and `octavo worker`: those suggested, and those asked for."""
    settings: dict[str, Any] = {
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "kv_cache_memory": f"{plan.kv_cache_bytes // (1 << 20)}MiB",
    }
    for name in ("dtype", "model_impl", "quantization", "kv_cache_dtype"):
        if getattr(arguments, name) != "auto":
            settings[name] = getattr(arguments, name)
    if arguments.dequantized_copies == "never":
        settings["dequantized_copies"] = "never"
    elif plan.copies_bytes:
        # The cache's size was taken beside them: a worker without them would leave theirs unused.
        settings["dequantized_copies"] = "always"
    if arguments.max_model_len or plan.max_model_len < footprint.max_model_len:
        settings["max_model_len"] = plan.max_model_len
    if arguments.block_size != 16:
        settings["block_size"] = arguments.block_size
    if plan.tensor_parallel > 1:
        settings["tensor_parallel"] = plan.tensor_parallel
    return settings


def _lines(name: str, footprint: Any, gpu: Gpu, plan: CardPlan, wish: Wish) -> list[str]:
    cards = f"{plan.tensor_parallel} x {gpu.name}" if plan.tensor_parallel > 1 else gpu.name
    each = " each" if plan.tensor_parallel > 1 else ""
    context = min(wish.context_tokens, footprint.max_model_len)
    stored = f", {_gb(footprint.stored_bytes)} stored" if footprint.stored_bytes else ""
    lines = [
        f"{name} ({footprint.architecture}, {footprint.implementation}) on {cards}",
        _line("card", f"{_gb(gpu.memory_bytes)}{each}, {_gb(plan.usable_bytes)} to be used"),
        _line("weights", f"{_gb(plan.weight_bytes)}{each} ({footprint.weight_format}{stored})"),
        *_copies_lines(footprint, plan, each),
        _line("a step's scratch", f"{_gb(plan.scratch_bytes)}{each}, at most"),
        _line("KV cache", f"{_gb(plan.kv_cache_bytes)}{each} ({footprint.kv_dtype})"),
        _line("", f"{plan.kv_bytes_per_token:,} bytes a token{each}"),
        _line("", f"{plan.num_kv_blocks:,} blocks = {plan.num_kv_tokens:,} tokens"),
        _line(
            "sequences",
            f"{plan.sequences_at_max_len:,.1f} of {footprint.max_model_len:,} tokens, "
            f"{plan.sequences_at_context:,.1f} of {context:,}",
        ),
    ]
    if plan.limits is not None:
        limits = plan.limits
        lines += [
            _line("at most", f"{limits.one_sequence:,.0f} tokens/s for one sequence (bandwidth)"),
            _line("", f"{limits.all_sequences:,.0f} tokens/s for {plan.max_num_seqs:,} at a time"),
            _line("", f"{limits.prefill:,.0f} prompt tokens/s (arithmetic)"),
        ]
    return lines


def _copies_lines(footprint: Any, plan: CardPlan, each: str) -> list[str]:
    """Nothing for models that have no 4-bit layers."""
    if not footprint.copies_bytes:
        return []
    each_bytes = footprint.copies_bytes // plan.tensor_parallel
    kept = f"none; of 4-bit layers they'd take {_gb(each_bytes)}{each}"
    if plan.copies_bytes:
        kept = f"{_gb(plan.copies_bytes)}{each} (of 4-bit layers, for steps of many rows)"
    return [_line("16-bit copies", kept)]


def _line(label: str, text: str) -> str:
    return f"  {label:<18}{text}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes < 100e9 else f"{num_bytes / 1e9:,.0f} GB"
