"""What a model of transformers asks of its attention, found by running it once on nothing.

The model runs on three tokens, usually on the meta device, where a tensor is a shape: our
attention notes what each layer passes, and our mask what each layer may see. Masks are described
by functions of two positions; evaluating them tells causal from windowed from chunked, whatever
the model's configuration calls it. That the run succeeds without values also says that a step can
be captured in a CUDA graph. What paged attention can't compute is refused by name.

Must not know: files, steps, backends. Entry point: `probe`.

T tokens, H query heads, K kv heads, D head dim.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from octavo.errors import ConfigurationError
from octavo_worker.attention_inputs import AttentionOptions

PROBE = "octavo_probe"
_NUM_TOKENS = 3
# Keywords that every attention gets and that change nothing here.
_HARMLESS = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "scaling",
        "sliding_window",
        "softcap",
        "use_cache",
    }
)

MaskFunction = Callable[[int, int, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer's attention; `module` is its name in the decoder."""

    module: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    options: AttentionOptions


class Probed(NamedTuple):
    """`output_class` is what the decoder's forward returns; `vocab_size` the logits' width."""

    layers: tuple[AttentionLayer, ...]
    output_class: type[Any]
    vocab_size: int


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part between ids and the last hidden states. Raises ConfigurationError: there is none."""
    decoder = model.get_decoder()
    if decoder is model:
        raise _refusal(model, "its decoder can't be told from its head")
    return decoder


@torch.no_grad()
def probe(model: PreTrainedModel, max_model_len: int) -> Probed:
    """Run `model` once and say what it asks for; its attention is the probe's afterwards.

    Raises ConfigurationError naming what paged attention can't compute; whatever else the model
    raises (on the meta device: values were needed) passes through.
    """
    decoder = decoder_of(model)
    _check_kind(model, decoder)
    recorder = _Recorder(model, decoder, max_model_len)
    AttentionInterface.register(PROBE, recorder.attend)
    AttentionMaskInterface.register(PROBE, recorder.mask)
    model.set_attn_implementation(PROBE)
    device = next(decoder.parameters()).device
    # A mask of ones keeps transformers from looking for packed sequences in the positions.
    ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device=device)
    mask = torch.ones_like(ids)
    output = decoder(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
    num_layers = model.config.get_text_config().num_hidden_layers
    layers = recorder.layers()
    if not layers:
        raise _refusal(model, "it doesn't attend through transformers' AttentionInterface")
    if len(layers) != num_layers:
        raise _refusal(model, f"{len(layers)} of its {num_layers} layers are plain attention")
    shapes = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
    if len(shapes) > 1:
        raise _refusal(model, f"its layers' (heads, kv heads, head dim) differ: {sorted(shapes)}")
    head = model.get_output_embeddings()
    if head is None:
        raise _refusal(model, "it has no head over the vocabulary")
    return Probed(layers, type(output), head.weight.shape[0])


def _check_kind(model: PreTrainedModel, decoder: nn.Module) -> None:
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder or getattr(config, "is_encoder_decoder", False):
        raise _refusal(model, "it has an encoder")
    if getattr(model, "_is_stateful", False):
        raise _refusal(model, "its layers carry a state (recurrent or linear attention)")
    if any(isinstance(module, nn.Conv1d) for module in decoder.modules()):
        raise _refusal(model, "its layers mix neighbouring tokens by convolution")
    if getattr(config, "num_kv_shared_layers", 0):
        raise _refusal(model, "its layers share keys and values")
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise _refusal(model, "its decoder takes no position_ids")


class _Recorder:
    """The probe's attention and mask."""

    def __init__(self, model: PreTrainedModel, decoder: nn.Module, max_model_len: int) -> None:
        self._model = model
        self._names = {module: name for name, module in decoder.named_modules()}
        self._span = max_model_len
        self._masks: list[tuple[Tensor, MaskFunction]] = []
        self._windows: dict[int, int | None] = {}  # mask -> window
        self._layers: dict[int, AttentionLayer] = {}

    def layers(self) -> tuple[AttentionLayer, ...]:
        """By index."""
        return tuple(self._layers[index] for index in sorted(self._layers))

    def mask(self, *, mask_function: MaskFunction, device: torch.device, **_: Any) -> Tensor:
        mask = torch.zeros(1, 1, _NUM_TOKENS, _NUM_TOKENS, device=device)
        self._masks.append((mask, mask_function))
        return mask

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Note a layer; zeros [1, T, H, value's dim]."""
        for name, passed in kwargs.items():
            if name not in _HARMLESS and passed is not None:
                raise _refusal(self._model, f"its attention takes {name}")
        if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
            raise _refusal(self._model, "its attention isn't causal")
        index = getattr(module, "layer_idx", None)
        if index is None or index in self._layers:
            raise _refusal(self._model, "it doesn't attend once a layer")
        (_, num_heads, _, head_dim), num_kv_heads = query.shape, key.shape[1]
        if key.shape != (1, num_kv_heads, _NUM_TOKENS, head_dim) or (
            value.shape[:3] != key.shape[:3] or value.shape[3] > head_dim
        ):
            shapes = f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
            raise _refusal(self._model, f"its queries, keys and values have the shapes {shapes}")
        scale = kwargs.get("scaling")
        self._layers[index] = AttentionLayer(
            module=self._names[module],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            options=AttentionOptions(
                scale=head_dim**-0.5 if scale is None else float(scale),
                window=self._window(attention_mask, kwargs.get("sliding_window")),
                soft_cap=kwargs.get("softcap"),
            ),
        )
        return query.new_zeros(1, _NUM_TOKENS, num_heads, value.shape[3]), None

    def _window(self, mask: Tensor | None, asked: int | None) -> int | None:
        """Keys that a query sees by the mask that came with it; None = all before it."""
        if mask is None:  # the model leaves causality to its attention
            return None if asked is None or asked >= self._span else asked
        for number, (made, function) in enumerate(self._masks):
            if mask is made or mask._base is made:
                if number not in self._windows:
                    self._windows[number] = self._evaluate(function)
                return self._windows[number]
        raise _refusal(self._model, "it adds a bias or a mask of its own to the scores")

    def _evaluate(self, function: MaskFunction) -> int | None:
        keys = torch.arange(self._span)

        def seen(query: int) -> Tensor:
            return function(0, 0, torch.tensor(query), keys).expand(self._span)

        window = int(seen(self._span - 1).sum())
        edges = (window - 1, window, window + 1, self._span // 2, self._span - 1)
        for query in {0, *(edge for edge in edges if 0 <= edge < self._span)}:
            if not torch.equal(seen(query), (keys <= query) & (keys > query - window)):
                raise _refusal(self._model, "its mask is neither causal nor a sliding window")
        return None if window == self._span else window


def _refusal(model: PreTrainedModel, reason: str) -> ConfigurationError:
    name = type(model).__name__
    return ConfigurationError(
        f"{name}: transformers' code of this model can't run with paged attention: {reason}"
    )
