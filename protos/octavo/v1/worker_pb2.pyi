from octavo.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_PHASE_UNSPECIFIED: _ClassVar[WorkerPhase]
    WORKER_PHASE_LOADING: _ClassVar[WorkerPhase]
    WORKER_PHASE_COMPILING: _ClassVar[WorkerPhase]
    WORKER_PHASE_CAPTURING: _ClassVar[WorkerPhase]
    WORKER_PHASE_RUNNING: _ClassVar[WorkerPhase]
    WORKER_PHASE_DRAINING: _ClassVar[WorkerPhase]

class RowEvent(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_EVENT_UNSPECIFIED: _ClassVar[RowEvent]
    ROW_EVENT_STOP: _ClassVar[RowEvent]
    ROW_EVENT_LENGTH: _ClassVar[RowEvent]
    ROW_EVENT_ERROR: _ClassVar[RowEvent]
WORKER_PHASE_UNSPECIFIED: WorkerPhase
WORKER_PHASE_LOADING: WorkerPhase
WORKER_PHASE_COMPILING: WorkerPhase
WORKER_PHASE_CAPTURING: WorkerPhase
WORKER_PHASE_RUNNING: WorkerPhase
WORKER_PHASE_DRAINING: WorkerPhase
ROW_EVENT_UNSPECIFIED: RowEvent
ROW_EVENT_STOP: RowEvent
ROW_EVENT_LENGTH: RowEvent
ROW_EVENT_ERROR: RowEvent

class WorkerDescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerDescribeResponse(_message.Message):
    __slots__ = ("wire_version", "worker_id", "boot_id", "phase", "model", "capacity", "epoch", "leader_id")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEADER_ID_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    worker_id: str
    boot_id: str
    phase: WorkerPhase
    model: _common_pb2.ModelSpec
    capacity: WorkerCapacity
    epoch: int
    leader_id: str
    def __init__(self, wire_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., phase: _Optional[_Union[WorkerPhase, str]] = ..., model: _Optional[_Union[_common_pb2.ModelSpec, _Mapping]] = ..., capacity: _Optional[_Union[WorkerCapacity, _Mapping]] = ..., epoch: _Optional[int] = ..., leader_id: _Optional[str] = ...) -> None: ...

class WorkerCapacity(_message.Message):
    __slots__ = ("num_blocks", "max_num_seqs", "max_num_batched_tokens", "backend", "device", "kv_bytes_per_token")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    backend: str
    device: str
    kv_bytes_per_token: int
    def __init__(self, num_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., backend: _Optional[str] = ..., device: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ...) -> None: ...

class WorkerAttachRequest(_message.Message):
    __slots__ = ("wire_version", "scheduler_id", "expected_epoch", "required_model")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_MODEL_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    scheduler_id: str
    expected_epoch: int
    required_model: _common_pb2.ModelSpec
    def __init__(self, wire_version: _Optional[int] = ..., scheduler_id: _Optional[str] = ..., expected_epoch: _Optional[int] = ..., required_model: _Optional[_Union[_common_pb2.ModelSpec, _Mapping]] = ...) -> None: ...

class WorkerAttachResponse(_message.Message):
    __slots__ = ("attached", "inventory")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    attached: WorkerAttached
    inventory: SealedBlocks
    def __init__(self, attached: _Optional[_Union[WorkerAttached, _Mapping]] = ..., inventory: _Optional[_Union[SealedBlocks, _Mapping]] = ...) -> None: ...

class WorkerAttached(_message.Message):
    __slots__ = ("boot_id", "epoch", "model", "capacity", "worker_id")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    epoch: int
    model: _common_pb2.ModelSpec
    capacity: WorkerCapacity
    worker_id: str
    def __init__(self, boot_id: _Optional[str] = ..., epoch: _Optional[int] = ..., model: _Optional[_Union[_common_pb2.ModelSpec, _Mapping]] = ..., capacity: _Optional[_Union[WorkerCapacity, _Mapping]] = ..., worker_id: _Optional[str] = ...) -> None: ...

class SealedBlocks(_message.Message):
    __slots__ = ("block_ids", "block_hashes")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_ids: bytes
    block_hashes: bytes
    def __init__(self, block_ids: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ...) -> None: ...

class WorkerStepsRequest(_message.Message):
    __slots__ = ("hello", "plan", "ping", "release")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    hello: StepsHello
    plan: Plan
    ping: StepsPing
    release: StepsRelease
    def __init__(self, hello: _Optional[_Union[StepsHello, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., ping: _Optional[_Union[StepsPing, _Mapping]] = ..., release: _Optional[_Union[StepsRelease, _Mapping]] = ...) -> None: ...

class StepsHello(_message.Message):
    __slots__ = ("wire_version", "boot_id", "epoch")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    boot_id: str
    epoch: int
    def __init__(self, wire_version: _Optional[int] = ..., boot_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class StepsPing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepsRelease(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Plan(_message.Message):
    __slots__ = ("plan_id", "removed_rows", "added_rows", "block_updates", "chunks", "sealed", "decode_until")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    REMOVED_ROWS_FIELD_NUMBER: _ClassVar[int]
    ADDED_ROWS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_UPDATES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    DECODE_UNTIL_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    removed_rows: bytes
    added_rows: _containers.RepeatedCompositeFieldContainer[RowAdd]
    block_updates: bytes
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    sealed: SealedBlocks
    decode_until: int
    def __init__(self, plan_id: _Optional[int] = ..., removed_rows: _Optional[bytes] = ..., added_rows: _Optional[_Iterable[_Union[RowAdd, _Mapping]]] = ..., block_updates: _Optional[bytes] = ..., chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ..., sealed: _Optional[_Union[SealedBlocks, _Mapping]] = ..., decode_until: _Optional[int] = ...) -> None: ...

class RowAdd(_message.Message):
    __slots__ = ("row", "generation", "sampling", "sequence_index", "block_ids", "num_computed_tokens", "max_total_tokens", "min_total_tokens", "history_token_ids", "num_prompt_tokens", "traceparent")
    ROW_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    row: int
    generation: int
    sampling: _common_pb2.SamplingParams
    sequence_index: int
    block_ids: bytes
    num_computed_tokens: int
    max_total_tokens: int
    min_total_tokens: int
    history_token_ids: bytes
    num_prompt_tokens: int
    traceparent: str
    def __init__(self, row: _Optional[int] = ..., generation: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., sequence_index: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., num_computed_tokens: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., min_total_tokens: _Optional[int] = ..., history_token_ids: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("row", "start", "token_ids", "is_last")
    ROW_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    row: int
    start: int
    token_ids: bytes
    is_last: bool
    def __init__(self, row: _Optional[int] = ..., start: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., is_last: bool = ...) -> None: ...

class WorkerStepsResponse(_message.Message):
    __slots__ = ("welcome", "results", "progress", "superseded")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    welcome: StepsWelcome
    results: StepResults
    progress: StepsProgress
    superseded: StepsSuperseded
    def __init__(self, welcome: _Optional[_Union[StepsWelcome, _Mapping]] = ..., results: _Optional[_Union[StepResults, _Mapping]] = ..., progress: _Optional[_Union[StepsProgress, _Mapping]] = ..., superseded: _Optional[_Union[StepsSuperseded, _Mapping]] = ...) -> None: ...

class StepsWelcome(_message.Message):
    __slots__ = ("wire_version",)
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    def __init__(self, wire_version: _Optional[int] = ...) -> None: ...

class StepResults(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[StepResult]
    def __init__(self, results: _Optional[_Iterable[_Union[StepResult, _Mapping]]] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step", "plan_id", "repeat", "rows", "generations", "token_ids", "events", "logprobs", "errors", "wait_us", "step_us", "prompt_logprobs")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    REPEAT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    step: int
    plan_id: int
    repeat: int
    rows: bytes
    generations: bytes
    token_ids: bytes
    events: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[ResultLogprobs]
    errors: _containers.RepeatedCompositeFieldContainer[RowError]
    wait_us: int
    step_us: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    def __init__(self, step: _Optional[int] = ..., plan_id: _Optional[int] = ..., repeat: _Optional[int] = ..., rows: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., events: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[ResultLogprobs, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[RowError, _Mapping]]] = ..., wait_us: _Optional[int] = ..., step_us: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ...) -> None: ...

class ResultLogprobs(_message.Message):
    __slots__ = ("entry", "logprobs")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    entry: int
    logprobs: _common_pb2.TokenLogprobs
    def __init__(self, entry: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("row", "generation", "start", "entries")
    ROW_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    row: int
    generation: int
    start: int
    entries: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, row: _Optional[int] = ..., generation: _Optional[int] = ..., start: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class RowError(_message.Message):
    __slots__ = ("row", "generation", "message")
    ROW_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    row: int
    generation: int
    message: str
    def __init__(self, row: _Optional[int] = ..., generation: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class StepsProgress(_message.Message):
    __slots__ = ("phase", "step", "num_queued_plans")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_PLANS_FIELD_NUMBER: _ClassVar[int]
    phase: WorkerPhase
    step: int
    num_queued_plans: int
    def __init__(self, phase: _Optional[_Union[WorkerPhase, str]] = ..., step: _Optional[int] = ..., num_queued_plans: _Optional[int] = ...) -> None: ...

class StepsSuperseded(_message.Message):
    __slots__ = ("leader_id", "epoch")
    LEADER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    leader_id: str
    epoch: int
    def __init__(self, leader_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...
