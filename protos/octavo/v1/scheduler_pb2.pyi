from octavo.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CancelReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CANCEL_REASON_UNSPECIFIED: _ClassVar[CancelReason]
    CANCEL_REASON_CLIENT: _ClassVar[CancelReason]
    CANCEL_REASON_STOP: _ClassVar[CancelReason]
    CANCEL_REASON_DEADLINE: _ClassVar[CancelReason]
CANCEL_REASON_UNSPECIFIED: CancelReason
CANCEL_REASON_CLIENT: CancelReason
CANCEL_REASON_STOP: CancelReason
CANCEL_REASON_DEADLINE: CancelReason

class SchedulerSessionRequest(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "ping")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    hello: SessionHello
    submit: Submit
    cancel: Cancel
    ping: SessionPing
    def __init__(self, hello: _Optional[_Union[SessionHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., ping: _Optional[_Union[SessionPing, _Mapping]] = ...) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("wire_version", "router_id")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    router_id: str
    def __init__(self, wire_version: _Optional[int] = ..., router_id: _Optional[str] = ...) -> None: ...

class SessionPing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "request_id", "prompt_token_ids", "root_hash", "block_hashes", "sampling", "num_sequences", "deadline_ms", "tenant", "priority", "traceparent", "resumes", "tracestate", "lost_scheduler_id", "num_suspicions")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ROOT_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    LOST_SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SUSPICIONS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    prompt_token_ids: bytes
    root_hash: bytes
    block_hashes: bytes
    sampling: _common_pb2.SamplingParams
    num_sequences: int
    deadline_ms: int
    tenant: str
    priority: int
    traceparent: str
    resumes: _containers.RepeatedCompositeFieldContainer[ResumeSequence]
    tracestate: str
    lost_scheduler_id: str
    num_suspicions: int
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., root_hash: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., num_sequences: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., traceparent: _Optional[str] = ..., resumes: _Optional[_Iterable[_Union[ResumeSequence, _Mapping]]] = ..., tracestate: _Optional[str] = ..., lost_scheduler_id: _Optional[str] = ..., num_suspicions: _Optional[int] = ...) -> None: ...

class ResumeSequence(_message.Message):
    __slots__ = ("sequence_index", "delivered_token_ids", "finished")
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    sequence_index: int
    delivered_token_ids: bytes
    finished: bool
    def __init__(self, sequence_index: _Optional[int] = ..., delivered_token_ids: _Optional[bytes] = ..., finished: bool = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("handle", "sequence_index", "reason", "num_kept_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    sequence_index: int
    reason: CancelReason
    num_kept_tokens: int
    def __init__(self, handle: _Optional[int] = ..., sequence_index: _Optional[int] = ..., reason: _Optional[_Union[CancelReason, str]] = ..., num_kept_tokens: _Optional[int] = ...) -> None: ...

class SchedulerSessionResponse(_message.Message):
    __slots__ = ("welcome", "started", "tokens", "finished", "rejected", "moved", "load", "prompt_logprobs", "number", "suspects")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SUSPECTS_FIELD_NUMBER: _ClassVar[int]
    welcome: SessionWelcome
    started: _containers.RepeatedCompositeFieldContainer[Started]
    tokens: TokenBatch
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    rejected: _containers.RepeatedCompositeFieldContainer[Rejected]
    moved: Moved
    load: _common_pb2.Load
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobsBatch]
    number: int
    suspects: _containers.RepeatedCompositeFieldContainer[MovedSuspect]
    def __init__(self, welcome: _Optional[_Union[SessionWelcome, _Mapping]] = ..., started: _Optional[_Iterable[_Union[Started, _Mapping]]] = ..., tokens: _Optional[_Union[TokenBatch, _Mapping]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., rejected: _Optional[_Iterable[_Union[Rejected, _Mapping]]] = ..., moved: _Optional[_Union[Moved, _Mapping]] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobsBatch, _Mapping]]] = ..., number: _Optional[int] = ..., suspects: _Optional[_Iterable[_Union[MovedSuspect, _Mapping]]] = ...) -> None: ...

class SessionWelcome(_message.Message):
    __slots__ = ("wire_version", "scheduler_id", "model")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    scheduler_id: str
    model: _common_pb2.ModelSpec
    def __init__(self, wire_version: _Optional[int] = ..., scheduler_id: _Optional[str] = ..., model: _Optional[_Union[_common_pb2.ModelSpec, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("handle", "sequence_index", "num_cached_tokens", "queue_ms")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    sequence_index: int
    num_cached_tokens: int
    queue_ms: int
    def __init__(self, handle: _Optional[int] = ..., sequence_index: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., queue_ms: _Optional[int] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("handles", "sequence_indexes", "counts", "token_ids", "logprobs")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEXES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    sequence_indexes: bytes
    counts: bytes
    token_ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[BatchLogprobs]
    def __init__(self, handles: _Optional[bytes] = ..., sequence_indexes: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[BatchLogprobs, _Mapping]]] = ...) -> None: ...

class BatchLogprobs(_message.Message):
    __slots__ = ("token_index", "logprobs")
    TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_index: int
    logprobs: _common_pb2.TokenLogprobs
    def __init__(self, token_index: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class PromptLogprobsBatch(_message.Message):
    __slots__ = ("handle", "start", "entries")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    handle: int
    start: int
    entries: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, handle: _Optional[int] = ..., start: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("handle", "sequence_index", "reason", "error", "num_tokens", "num_preemptions", "num_moves")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVES_FIELD_NUMBER: _ClassVar[int]
    handle: int
    sequence_index: int
    reason: _common_pb2.FinishReason
    error: _common_pb2.Error
    num_tokens: int
    num_preemptions: int
    num_moves: int
    def __init__(self, handle: _Optional[int] = ..., sequence_index: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., num_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_moves: _Optional[int] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("handle", "error", "is_full")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    IS_FULL_FIELD_NUMBER: _ClassVar[int]
    handle: int
    error: _common_pb2.Error
    is_full: bool
    def __init__(self, handle: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., is_full: bool = ...) -> None: ...

class Moved(_message.Message):
    __slots__ = ("successor", "suspects")
    SUCCESSOR_FIELD_NUMBER: _ClassVar[int]
    SUSPECTS_FIELD_NUMBER: _ClassVar[int]
    successor: str
    suspects: _containers.RepeatedCompositeFieldContainer[MovedSuspect]
    def __init__(self, successor: _Optional[str] = ..., suspects: _Optional[_Iterable[_Union[MovedSuspect, _Mapping]]] = ...) -> None: ...

class MovedSuspect(_message.Message):
    __slots__ = ("handle", "num_suspicions")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_SUSPICIONS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    num_suspicions: int
    def __init__(self, handle: _Optional[int] = ..., num_suspicions: _Optional[int] = ...) -> None: ...

class SchedulerDescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SchedulerDescribeResponse(_message.Message):
    __slots__ = ("wire_version", "scheduler_id", "model", "workers", "load", "max_request_tokens")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    scheduler_id: str
    model: _common_pb2.ModelSpec
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    load: _common_pb2.Load
    max_request_tokens: int
    def __init__(self, wire_version: _Optional[int] = ..., scheduler_id: _Optional[str] = ..., model: _Optional[_Union[_common_pb2.ModelSpec, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ..., max_request_tokens: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "boot_id", "address", "epoch", "num_rows", "max_num_seqs", "num_blocks", "num_used_blocks", "num_cached_blocks", "step")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    boot_id: str
    address: str
    epoch: int
    num_rows: int
    max_num_seqs: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    step: int
    def __init__(self, worker_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., address: _Optional[str] = ..., epoch: _Optional[int] = ..., num_rows: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_used_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class SchedulerDrainRequest(_message.Message):
    __slots__ = ("grace_ms",)
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    grace_ms: int
    def __init__(self, grace_ms: _Optional[int] = ...) -> None: ...

class SchedulerDrainResponse(_message.Message):
    __slots__ = ("num_unfinished",)
    NUM_UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    num_unfinished: int
    def __init__(self, num_unfinished: _Optional[int] = ...) -> None: ...

class SchedulerWatchRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class SchedulerWatchResponse(_message.Message):
    __slots__ = ("picture_json",)
    PICTURE_JSON_FIELD_NUMBER: _ClassVar[int]
    picture_json: bytes
    def __init__(self, picture_json: _Optional[bytes] = ...) -> None: ...
