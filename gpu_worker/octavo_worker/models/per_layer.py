"""What config.json says of each layer: the window it attends in, the positions it knows.

Families name these rules (`families.Family.windows`, `.ropes`); each takes config.json's fields
and gives a value a layer. Must not know: tensors, files.
"""

from octavo.errors import ConfigurationError
from octavo_worker.models.fields import Fields, count
from octavo_worker.models.rope import RopeConfig

_SLIDING = {"sliding_attention": True, "full_attention": False}

Windows = tuple[int | None, ...]
Ropes = tuple[RopeConfig | None, ...]


def no_windows(fields: Fields) -> Windows:
    """Every query sees all keys before it, whatever stands there."""
    return (None,) * fields["num_hidden_layers"]


def windows_everywhere(fields: Fields) -> Windows:
    """`sliding_window` in all layers, unless it's null."""
    return _windows(fields, [True] * fields["num_hidden_layers"])


def windows_by_layer(fields: Fields) -> Windows:
    """By `layer_types`, else from layer `max_window_layers` on; if `use_sliding_window`."""
    if not fields["use_sliding_window"]:
        return no_windows(fields)
    num_layers = fields["num_hidden_layers"]
    by_default = [index >= fields["max_window_layers"] for index in range(num_layers)]
    return _windows(fields, _is_sliding(fields, by_default))


def windows_if_used(fields: Fields) -> Windows:
    """`sliding_window` in all layers, if `use_sliding_window`."""
    return windows_everywhere(fields) if fields["use_sliding_window"] else no_windows(fields)


def windows_on_even_layers(fields: Fields) -> Windows:
    """By `layer_types`, else the even layers below `max_window_layers`; if `use_sliding_window`."""
    if not fields["use_sliding_window"]:
        return no_windows(fields)
    num_layers, limit = fields["num_hidden_layers"], fields["max_window_layers"]
    by_default = [index % 2 == 0 and index < limit for index in range(num_layers)]
    return _windows(fields, _is_sliding(fields, by_default))


def windows_without_positions(fields: Fields) -> Windows:
    """By `layer_types`, else where `_has_rope` says no; if `use_sliding_window`."""
    if not fields["use_sliding_window"]:
        return no_windows(fields)
    return _windows(fields, _is_sliding(fields, [not has_rope for has_rope in _has_rope(fields)]))


def windows_by_pattern(fields: Fields) -> Windows:
    """By `layer_types`, else in all layers but every `sliding_window_pattern`-th."""
    return _windows(fields, _is_local(fields))


def _is_local(fields: Fields) -> list[bool]:
    every, num_layers = count(fields, "sliding_window_pattern"), fields["num_hidden_layers"]
    return _is_sliding(fields, [(index + 1) % every != 0 for index in range(num_layers)])


def _is_sliding(fields: Fields, by_default: list[bool]) -> list[bool]:
    """Which layers have a window: as `layer_types` says, where it's there."""
    layer_types = fields.get("layer_types")
    if layer_types is None:
        return by_default
    if not isinstance(layer_types, list) or not set(layer_types) <= _SLIDING.keys():
        raise ConfigurationError(
            f"config.json: layer_types={layer_types!r:.200} must be a list of {', '.join(_SLIDING)}"
        )
    _require_all_layers(fields, "layer_types", len(layer_types))
    return [_SLIDING[layer_type] for layer_type in layer_types[: len(by_default)]]


def _windows(fields: Fields, is_sliding: list[bool]) -> Windows:
    if fields["sliding_window"] is None or not any(is_sliding):
        return no_windows(fields)
    window = count(fields, "sliding_window")
    return tuple(window if sliding else None for sliding in is_sliding)


def rope_everywhere(fields: Fields, rope: RopeConfig) -> Ropes:
    """The same positions for all layers."""
    return (rope,) * fields["num_hidden_layers"]


def rope_by_layer(fields: Fields, rope: RopeConfig) -> Ropes:
    """Some layers know no positions: `_has_rope`."""
    return tuple(rope if has_rope else None for has_rope in _has_rope(fields))


def local_and_global_ropes(fields: Fields, rope: RopeConfig) -> Ropes:
    """The layers of `windows_by_pattern` have `local_rope_parameters`, the others `rope`."""
    local_fields = {
        **fields,
        "rope_parameters": fields["local_rope_parameters"],
        "rope_theta": fields["rope_local_base_freq"],
    }
    local = RopeConfig.from_fields(local_fields, head_dim=rope.rotary_dim)
    return tuple(local if is_local else rope for is_local in _is_local(fields))


def _has_rope(fields: Fields) -> list[bool]:
    """`no_rope_layers` (1 = has rope, despite its name), else all but every n-th layer."""
    flags, num_layers = fields.get("no_rope_layers"), fields["num_hidden_layers"]
    if flags is None:
        interval = fields["no_rope_layer_interval"]
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    _require_all_layers(fields, "no_rope_layers", len(flags))
    return [bool(flag) for flag in flags[:num_layers]]


def _require_all_layers(fields: Fields, name: str, num_entries: int) -> None:
    num_layers = fields["num_hidden_layers"]
    if num_entries < num_layers:
        raise ConfigurationError(
            f"config.json: {name} has {num_entries} entries for {num_layers} layers"
        )
