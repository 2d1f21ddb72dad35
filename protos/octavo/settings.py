"""Settings: one frozen dataclass per service; environment and command line from one definition.

Each field made by `setting()` is at once an environment variable (`OCTAVO_` and the field's
name in capitals) and a command-line flag (`--` and the name with dashes). The flag wins over
the environment, the environment over the default. A mistake fails at start and names the
variable. A secret may also be in a file: `OCTAVO_<NAME>_FILE`, `--<name>-file`. Must not know:
any service. Entry points: `add_arguments`, `load`, `to_flags`, `to_environment`.
"""

import argparse
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar, get_type_hints

from octavo.errors import ConfigurationError
from octavo.setting import (
    FileSecret,
    check_value,
    environment_name,
    help_of,
    metavar_of,
    parse_value,
    setting,
)

SettingsT = TypeVar("SettingsT")


def add_arguments(
    parser: argparse.ArgumentParser, *classes: type[Any], exclude: Collection[str] = ()
) -> None:
    """Add a flag for every setting of `classes` (a field that several share, once)."""
    seen: set[str] = set(exclude)
    # What every process has comes first, as a group of its own.
    for cls in (CommonSettings, *classes):
        group = parser.add_argument_group(cls.__name__.removesuffix("Settings").lower())
        for item in fields(cls):
            if item.name in seen:
                continue
            seen.add(item.name)
            text = help_of(item).replace("%", "%%")
            flag, metavar = f"--{item.name.replace('_', '-')}", metavar_of(item)
            group.add_argument(flag, dest=item.name, default=None, help=text, metavar=metavar)
            if item.metadata["secret"]:
                text = f"file that holds {item.name}"
                group.add_argument(f"{flag}-file", default=None, help=text, metavar="FILE")


def load(
    cls: type[SettingsT],
    arguments: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> SettingsT:
    """Build `cls` from flags (`vars(parsed)`), then the environment, then defaults.

    Raises ConfigurationError naming the variable of the first wrong value.
    """
    environ = os.environ if environ is None else environ
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for item in fields(cls):  # type: ignore[arg-type]
        given = (arguments or {}).get(item.name)
        if item.metadata["secret"]:
            given = _find_secret(item.name, arguments or {}, environ)
        elif given is None:
            given = environ.get(environment_name(item.name))
        if given is None:
            continue
        is_text = isinstance(given, str) and not isinstance(given, FileSecret)
        value = parse_value(item.name, hints[item.name], given) if is_text else given
        check_value(item, value)
        values[item.name] = value
    return cls(**values)


def _find_secret(name: str, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """Flags win over the environment; each may hold the secret or name its file, not both."""
    variable = environment_name(name)
    for given, path in (
        (arguments.get(name), arguments.get(f"{name}_file")),
        (environ.get(variable), environ.get(f"{variable}_FILE")),
    ):
        if given and path:
            message = f"{variable} and {variable}_FILE: only one of them can be given"
            raise ConfigurationError(message, param=name)
        if path:
            return FileSecret(name, path)
        if given is not None:
            return given
    return None


def to_flags(settings: Any, *, only_changed: bool = True) -> list[str]:
    """The flags that reproduce `settings` in a child process; secrets are left out."""
    flags: list[str] = []
    for item in fields(settings):
        value = getattr(settings, item.name)
        if item.metadata["secret"] or (only_changed and value == item.default):
            continue
        text = ",".join(value) if isinstance(value, tuple) else "" if value is None else str(value)
        flags += [f"--{item.name.replace('_', '-')}", text]
    return flags


def to_environment(settings: Any) -> dict[str, str]:
    """What gives a child process the secrets of `settings`, which no command line may hold.

    Both variables of each are set: what the child would inherit of them doesn't count.
    """
    environ: dict[str, str] = {}
    for item in fields(settings):
        if not item.metadata["secret"]:
            continue
        value = getattr(settings, item.name)
        variable = environment_name(item.name)
        path = value.path if isinstance(value, FileSecret) else ""
        environ |= {variable: "" if path else value, f"{variable}_FILE": path}
    return environ


@dataclass(frozen=True)
class CommonSettings:
    """What every process has."""

    log_level: str = setting("info", "log level", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("text", "lines for people, or JSON objects", choices=("text", "json"))
    redis_url: str = setting(
        "",
        "Redis (redis, rediss, unix, redis+sentinel, redis+cluster URL); empty = none",
        secret=True,
    )
    fleet: str = setting("default", "name of the fleet (one model) in Redis keys")
    drain_grace_s: float = setting(30.0, "seconds to finish work after SIGTERM", minimum=0)
    tls_cert: str = setting("", "PEM certificate shown to the other services; empty = plaintext")
    tls_key: str = setting("", "PEM key of tls_cert")
    tls_ca: str = setting("", "PEM authorities that signed the other services' certificates")
    tls_server_name: str = setting(
        "", "name in the other services' certificates; empty = the host dialled"
    )
    internal_token: str = setting(
        "",
        "shared by all services and sent on every call; of a comma list the first is sent, each "
        "is accepted",
        secret=True,
    )
    metrics_port: int = setting(
        0, "HTTP port for Prometheus (scheduler, worker); 0 = off", minimum=0, maximum=65535
    )
    vllm_metrics: bool = setting(True, "export metrics under vLLM's names too")
    served_model_name: tuple[str, ...] = setting(
        (), "names that requests may use (comma list); the first is the model_name of vllm: metrics"
    )


@dataclass(frozen=True)
class RouterSettings(CommonSettings):
    """Settings of `octavo router`.

    What bounds a connection and a body is set here. What is in a body is bounded by constants
    beside its validation, in octavo_router's requests, params, token_rules, app and prompts:
    4,096 messages; 1,024 prompts; 4,096 choices (n times prompts), n at most 128; 16 stop strings
    of 1,024 characters; 128 stop ids; 1,024 biased ids; 128 bad words of 256 characters; 20
    alternatives per token; a model's name of 256, an Idempotency-Key of 256 and an X-Request-Id
    of 128 characters; 2,097,152 characters and 1,048,576 ids to tokenize or detokenize.
    """

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "HTTP port (0 = any free one)", minimum=0, maximum=65535)
    grpc_port: int = setting(8001, "gRPC port (0 = any free one)", minimum=0, maximum=65535)
    router_id: str = setting("", "stable name of this router (empty = random)")
    model: str = setting("", "Hugging Face id or folder of the tokenizer and template")
    revision: str | None = setting(None, "revision of the Hugging Face id")
    schedulers: tuple[str, ...] = setting((), "static scheduler addresses (comma list)")
    api_keys: str = setting("", "key[:tenant] comma list; empty = open", secret=True)
    public_tls_cert: str = setting("", "PEM certificate of both doors; empty = plaintext")
    public_tls_key: str = setting("", "PEM key of public_tls_cert")
    public_tls_ca: str = setting("", "PEM authorities that clients' certificates must come from")
    tenant_quotas: tuple[str, ...] = setting(
        (), "tenant=60r/m:100000t/m comma list: requests, tokens per minute; * = others"
    )
    share_prefixes: bool = setting(False, "let tenants share cached prefixes")
    tokenizer_threads: int = setting(2, "threads that render and tokenize", minimum=1)
    max_body_bytes: int = setting(16 << 20, "largest HTTP body and gRPC message", minimum=1024)
    max_header_bytes: int = setting(64 << 10, "largest HTTP head (URL, headers)", minimum=1024)
    read_timeout_s: float = setting(
        60.0, "time for a request to arrive, plus 1 s per 16 KiB", minimum=0.1
    )
    write_stall_s: float = setting(
        60.0, "a client that reads nothing for this long is dropped", minimum=0.1
    )
    request_timeout_s: float = setting(0.0, "default deadline of a request; 0 = none", minimum=0)
    redial_ms: int = setting(200, "time to re-dial a lost scheduler", minimum=0)
    max_moves: int = setting(2, "re-submissions of a request after lost schedulers", minimum=0)
    ui: bool = setting(True, "serve the status page at /ui")
    trust_remote_code: bool = setting(False, "run tokenizer code shipped with the model")
    trust_request_chat_template: bool = setting(
        False, "let requests bring their own chat_template, a program that runs sandboxed"
    )


class Preset(NamedTuple):
    """What a preset stands for where nothing is set; 0 = no limit."""

    itl_target_ms: float
    itl_stretch: float


# 2.25 keeps gaps below 3 usual ones even where a chunk takes longer than estimated.
PRESETS = {
    "latency": Preset(50.0, 2.25),
    "balanced": Preset(50.0, 0.0),
    "throughput": Preset(0.0, 0.0),
}


@dataclass(frozen=True)
class SchedulerSettings(CommonSettings):
    """Settings of `octavo scheduler`."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8100, "gRPC port (0 = any free one)", minimum=0, maximum=65535)
    scheduler_id: str = setting("", "stable name of this scheduler (empty = random)")
    workers: tuple[str, ...] = setting((), "static worker addresses (comma list)")
    max_workers: int = setting(
        8, "workers to claim from the registry while other schedulers have room", minimum=1
    )
    max_num_seqs: int = setting(0, "sequences per worker; 0 = the worker's own", minimum=0)
    max_num_batched_tokens: int = setting(0, "tokens per step; 0 = the worker's own", minimum=0)
    enable_prefix_caching: bool = setting(True, "reuse KV blocks of equal prefixes")
    max_queue_tokens: int = setting(
        1 << 20, "prompt tokens that may wait before a new request", minimum=1
    )
    max_queue_wait_s: float = setting(
        30.0,
        "seconds within which first tokens come: refused is what would wait longer; 0 = none",
        minimum=0,
    )
    tenant_weights: tuple[str, ...] = setting(
        (), "shares of tenants in a full queue: tenant=weight comma list; others have 1"
    )
    priority_ageing_s: float = setting(
        5.0, "wait that raises a request by one priority; 0 = none", minimum=0
    )
    admission_watermark: float = setting(
        0.01, "share of blocks kept free when admitting", minimum=0, maximum=0.5
    )
    growth_reserve: float = setting(
        1.0,
        "share of the answers' expected growth kept free when admitting; 0 = none",
        minimum=0,
        maximum=1,
    )
    admission_max_wait_s: float = setting(
        30.0, "after this wait the head of the queue reserves", minimum=0
    )
    affinity_budget_ms: float = setting(
        2000.0, "longest extra wait for a worker that has the prefix", minimum=0
    )
    min_chunk_tokens: int = setting(64, "least prefill chunk while anything waits", minimum=1)
    preset: str = setting(
        "balanced",
        "how prompts are computed beside streams. latency: in chunks that hardly delay these; "
        "balanced: in steps of 50 ms; throughput: in chunks as large as a step",
        choices=tuple(PRESETS),
    )
    itl_target_ms: float = setting(
        0.0, "longest step beside a stream, if chunks allow; 0 = the preset's", minimum=0
    )
    itl_stretch: float = setting(
        0.0,
        "the same, in steps that its streams are used to; 0 = the preset's, or none beside an "
        "itl_target_ms",
        minimum=0,
    )
    plans_queued: int = setting(2, "plans sent ahead of results", minimum=1, maximum=8)
    lease_steps: int = setting(
        8, "decode steps a worker may run by itself (decode_until); 0 = none", minimum=0
    )
    session_flush_ms: float = setting(4.0, "longest wait of a token for its frame", minimum=0)
    max_moves: int = setting(2, "times a suspect request moves to another worker", minimum=0)
    max_preemptions: int = setting(3, "times a sequence may be preempted", minimum=0)
    hang_floor_s: float = setting(5.0, "least silence that counts as a hang", minimum=0.1)
    check_integrity: bool = setting(False, "check the block pool after every step (slow)")

    @property
    def itl_limits(self) -> Preset:
        """The preset's, but for what is set by itself."""
        preset = PRESETS[self.preset]
        stretch = self.itl_stretch or (0.0 if self.itl_target_ms else preset.itl_stretch)
        return Preset(self.itl_target_ms or preset.itl_target_ms, stretch)


@dataclass(frozen=True)
class WorkerSettings(CommonSettings):
    """Settings of `octavo worker`."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8200, "gRPC port (0 = any free one)", minimum=0, maximum=65535)
    worker_id: str = setting("", "stable name of this worker (empty = random)")
    model: str = setting("", "Hugging Face id or folder of the model")
    revision: str | None = setting(None, "revision of the Hugging Face id")
    load_format: str = setting(
        "auto", "auto = safetensors; random = seeded weights", choices=("auto", "random")
    )
    model_impl: str = setting(
        "auto",
        "native, transformers (its code, with paged attention), or auto = native if known",
        choices=("auto", "native", "transformers"),
    )
    backend: str = setting("auto", "auto, cuda or cpu", choices=("auto", "cuda", "cpu"))
    dtype: str = setting(
        "auto",
        "auto = the checkpoint's on cuda, float32 on cpu",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    tensor_parallel: int = setting(
        1, "ranks that share the model: cards, on cpu processes", minimum=1, maximum=64
    )
    quantization: str = setting(
        "auto",
        "auto = as the checkpoint is; fp8 = linear layers rounded to 8-bit floats at load",
        choices=("auto", "fp8"),
    )
    dequantized_copies: str = setting(
        "auto",
        "16-bit copies of 4-bit layers on a card, for steps of many rows: always, never, or auto "
        "= if KV blocks lose at most a sixth to them",
        choices=("auto", "always", "never"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "auto = the dtype that is computed in; fp8 = 8-bit floats, half the bytes",
        choices=("auto", "fp8"),
    )
    block_size: int = setting(16, "tokens per KV block", choices=(16, 32))
    max_num_seqs: int = setting(256, "rows", minimum=1, maximum=4096)
    max_num_batched_tokens: int = setting(
        0, "tokens per step; 0 = 8,192 on cuda, 512 on cpu", minimum=0
    )
    max_graph_tokens: int | None = setting(
        None,
        "prompt tokens of a step up to which it is one CUDA graph while other rows decode; "
        "0 = never, unset = by the model's size",
        minimum=0,
    )
    max_model_len: int = setting(0, "longest sequence; 0 = the model's", minimum=0)
    kv_cache_memory: str = setting(
        "", "KV cache size of each rank, e.g. 4GiB; empty = from free memory"
    )
    num_kv_blocks: int = setting(0, "KV blocks, the null block included; 0 = by size", minimum=0)
    memory_utilization: float = setting(
        0.9, "share of the device's memory to use", minimum=0.05, maximum=0.99
    )
    leader_silence_s: float = setting(
        3.0, "silence after which another leader may attach", minimum=0.1
    )
    trust_remote_code: bool = setting(False, "run model code shipped with the model")
    profile: str = setting("", "write a Chrome trace of the last steps to this file at the end")
