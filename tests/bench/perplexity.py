"""What fewer bits cost: the demo model's perplexity on texts that it knows, by stored form.

Each form goes the worker's way, from a folder through the loader, the paged cache and the runner
to log-probabilities of the prompt. 4-bit weights are rounded to the nearest code, which is the
least that a quantiser does, and costs a model of this size much. FP8 is e4m3, activations too:
where they are rounded, differences of 1e-7 in a layer's sums move the perplexity by 2 %. It lies
between two bounds: below the lower one nothing was rounded at all.

Run: python -m tests.bench.perplexity
"""

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.hub import resolve_model
from octavo.settings import WorkerSettings
from octavo_router.tokenizer import load_tokenizer
from octavo_worker.loading import load_runner
from octavo_worker.plan import Chunk, Plan, RowAdd, Sampling
from tests.unit.gpu_worker.quantized_checkpoints import (
    LINEARS,
    TENSORS,
    Recipe,
    quantization_config,
    round_to_nearest,
)

# In the public domain: the Declaration of Independence, the Constitution and its 14th amendment,
# Genesis.
KNOWN_TEXTS = (
    "We hold these truths to be self-evident, that all men are created equal, that they are "
    "endowed by their Creator with certain unalienable Rights, that among these are Life, Liberty "
    "and the pursuit of Happiness. That to secure these rights, Governments are instituted among "
    "Men, deriving their just powers from the consent of the governed, That whenever any Form of "
    "Government becomes destructive of these ends, it is the Right of the People to alter or to "
    "abolish it, and to institute new Government, laying its foundation on such principles and "
    "organizing its powers in such form, as to them shall seem most likely to effect their Safety "
    "and Happiness.",
    "We the People of the United States, in Order to form a more perfect Union, establish Justice, "
    "insure domestic Tranquility, provide for the common defence, promote the general Welfare, and "
    "secure the Blessings of Liberty to ourselves and our Posterity, do ordain and establish this "
    "Constitution for the United States of America.",
    "All persons born or naturalized in the United States, and subject to the jurisdiction "
    "thereof, are citizens of the United States and of the State wherein they reside. No State "
    "shall make or enforce any law which shall abridge the privileges or immunities of citizens of "
    "the United States; nor shall any State deprive any person of life, liberty, or property, "
    "without due process of law; nor deny to any person within its jurisdiction the equal "
    "protection of the laws.",
    "In the beginning God created the heaven and the earth. And the earth was without form, and "
    "void; and darkness was upon the face of the deep. And the Spirit of God moved upon the face "
    "of the waters. And God said, Let there be light: and there was light. And God saw the light, "
    "that it was good: and God divided the light from the darkness. And God called the light Day, "
    "and the darkness he called Night. And the evening and the morning were the first day.",
)
BLOCK_SIZE = 16
E4M3_MAX = 448.0
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
_COMPRESSED_FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _FLOAT8 | {"strategy": "channel"},
            "input_activations": _FLOAT8 | {"strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}
Save = Callable[[Path, Path], None]


@dataclass(frozen=True, slots=True)
class Form:
    """How a model is kept. `save(demo, folder)` writes it; None = the demo's folder as it is.
    `settings`: the worker's, by which it is loaded.

    Its perplexity is between `least` and `most` times float32's.
    """

    name: str
    least: float
    most: float
    save: Save | None = None
    settings: Mapping[str, str] = field(default_factory=dict[str, str])


def perplexity(folder: Path, texts: Sequence[Sequence[int]], **settings: Any) -> float:
    """exp of the mean of -log p over all tokens that have one before them, through a runner.

    All texts in one step; each takes a row and blocks of its own.
    """
    table = -(-max(map(len, texts)) // BLOCK_SIZE) + 1
    asked = WorkerSettings(
        model=str(folder),
        block_size=BLOCK_SIZE,
        max_num_seqs=len(texts),
        max_model_len=table * BLOCK_SIZE,
        max_num_batched_tokens=sum(map(len, texts)),
        num_kv_blocks=1 + table * len(texts),
        **settings,
    )
    runner = load_runner(asked).runner
    rows = [_row_add(row, ids, 1 + table * row, table) for row, ids in enumerate(texts)]
    chunks = [Chunk(add.row, 0, add.history_token_ids, is_last=True) for add in rows]
    runner.submit(Plan(1, added_rows=tuple(rows), chunks=tuple(chunks)))
    outcome = runner.poll()
    assert outcome is not None
    assert not outcome.faults
    logprobs = np.concatenate([piece.logprobs for piece in outcome.prompt_logprobs])
    assert len(logprobs) == sum(len(ids) - 1 for ids in texts)
    return math.exp(-float(logprobs.mean()))


def _row_add(row: int, ids: Sequence[int], first_block: int, num_blocks: int) -> RowAdd:
    return RowAdd(
        row=row,
        generation=1,
        sampling=Sampling(prompt_logprobs=0),
        sequence_index=0,
        block_ids=np.arange(first_block, first_block + num_blocks),
        num_computed_tokens=0,
        max_total_tokens=len(ids) + 1,
        history_token_ids=np.array(ids, np.int64),
        num_prompt_tokens=len(ids),
    )


def known_ids(folder: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(folder)
    return [tokenizer.encode(text).tolist() for text in KNOWN_TEXTS]


# --- forms ------------------------------------------------------------------------------------


def save_4_bit(method: str, group_size: int) -> Save:
    """Linear layers rounded to the nearest of 16 codes between each group's ends."""
    recipe = Recipe(method, group_size=group_size)

    def save(demo: Path, folder: Path) -> None:
        def store(name: str, weight: Tensor) -> dict[str, Tensor]:
            groups = np.arange(weight.shape[1]) // group_size
            layer = round_to_nearest(weight.numpy(), groups, recipe.bits, symmetric=False)
            return {f"{name}.{key}": t for key, t in TENSORS[method](layer, recipe).items()}

        save_linears(demo, folder, store, quantization_config=quantization_config(recipe))

    return save


def save_fp8(*, per_channel: bool) -> Save:
    """Linear layers in e4m3: with one scale (as AutoFP8), or one an output (as llm-compressor)."""
    described = _COMPRESSED_FP8 if per_channel else _AUTO_FP8

    def save(demo: Path, folder: Path) -> None:
        def store(name: str, weight: Tensor) -> dict[str, Tensor]:
            most = weight.abs().amax(1, keepdim=True) if per_channel else weight.abs().max()
            scale = most / E4M3_MAX
            codes = (weight / scale).to(torch.float8_e4m3fn)
            return {f"{name}.weight": codes, f"{name}.weight_scale": scale}

        save_linears(demo, folder, store, quantization_config=described)

    return save


def save_linears(
    demo: Path, folder: Path, store: Callable[[str, Tensor], dict[str, Tensor]], **config: Any
) -> None:
    """The demo's folder with each linear layer of the decoder as `store(name, weight)` has it."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(demo / "model.safetensors").items():
        module = name.removesuffix(".weight")
        is_linear = module.rsplit(".", 1)[-1] in LINEARS
        tensors |= store(module, tensor.float()) if is_linear else {name: tensor}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((demo / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | config))
    shutil.copy(demo / "generation_config.json", folder)


PLAIN = Form("as it is", 1.0, 1.0)
FORMS = (
    Form("4 bit, groups of 128 (GPTQ)", 2.2, 2.8, save_4_bit("gptq", 128)),
    Form("4 bit, groups of 32 (AWQ)", 1.55, 1.95, save_4_bit("awq", 32)),
    Form("FP8, one scale a layer (AutoFP8)", 1.005, 1.2, save_fp8(per_channel=False)),
    Form("FP8, one an output (llm-compressor)", 1.005, 1.2, save_fp8(per_channel=True)),
    Form("FP8, rounded at load", 1.005, 1.2, settings={"quantization": "fp8"}),
    Form("FP8 keys and values", 1.0005, 1.05, settings={"kv_cache_dtype": "fp8"}),
)


def measure(form: Form, demo: Path, *, backend: str = "cpu", dtype: str = "float32") -> float:
    """The form's perplexity, computed there and so."""
    texts = known_ids(demo)
    settings = {"backend": backend, "dtype": dtype, **form.settings}
    if form.save is None:
        return perplexity(demo, texts, **settings)
    with tempfile.TemporaryDirectory(prefix="octavo-perplexity-") as name:
        form.save(demo, Path(name))
        return perplexity(Path(name), texts, **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description="perplexity of the demo model by stored form")
    parser.add_argument("--backend", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", help="on a card bfloat16 or float16")
    args = parser.parse_args()
    demo = resolve_model("demo", None, weights=True)
    print(f"{sum(map(len, known_ids(demo)))} tokens of texts that the model knows")
    print(f"{'form':<36}{'perplexity':>11}{'x':>11}{'bounds':>17}")
    base = measure(PLAIN, demo, **vars(args))
    print(f"{args.dtype:<36}{base:>11.3f}")
    for form in FORMS:
        value = measure(form, demo, **vars(args))
        bounds = f"{form.least:g} .. {form.most:g}"
        print(f"{form.name:<36}{value:>11.3f}{value / base:>11.4f}{bounds:>17}")


if __name__ == "__main__":
    main()
