"""What a session may say, and what is refused by name."""

from typing import Any

import numpy as np
import pytest

from octavo.errors import InvalidRequestError
from octavo.model_spec import ModelSpec
from octavo.v1 import common_pb2, scheduler_pb2
from octavo_scheduler.frames import LoadNumbers, frame_to_proto, submission_from_proto
from octavo_scheduler.outbox import Frame, PromptLogprobsNote

MODEL = ModelSpec("m", "r", 16, "fp32", 1, 4096, 1000, (2,))


def ids(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def submit(**changes: Any) -> scheduler_pb2.Submit:
    fields: dict[str, Any] = {
        "handle": 7,
        "prompt_token_ids": ids(*range(40)),
        "root_hash": bytes(16),
        "block_hashes": bytes(range(32)),
        "sampling": common_pb2.SamplingParams(
            max_tokens=5, min_tokens=2, stop_token_ids=ids(2, 9), seed=11
        ),
        "num_sequences": 2,
    }
    return scheduler_pb2.Submit(**{**fields, **changes})


def resume(index: int, *tokens: int, finished: bool = False) -> scheduler_pb2.ResumeSequence:
    return scheduler_pb2.ResumeSequence(
        sequence_index=index, delivered_token_ids=ids(*tokens), finished=finished
    )


def test_everything_is_taken_over() -> None:
    message = submit(deadline_ms=50, priority=-3, tenant="t", resumes=[resume(1, 4, 5)])
    submission = submission_from_proto(message, MODEL)
    assert submission.handle == 7
    assert submission.block_hashes == (bytes(range(16)), bytes(range(16, 32)))
    assert (submission.max_tokens, submission.min_tokens) == (5, 2)
    assert submission.ending_ids == {2, 9}
    assert (submission.deadline_ms, submission.priority, submission.tenant) == (50, -3, "t")
    assert submission.resumes[0].delivered_token_ids == ids(4, 5)
    # What the scheduler doesn't read reaches the worker unchanged.
    assert common_pb2.SamplingParams.FromString(submission.sampling) == message.sampling
    assert submission_from_proto(submit(), MODEL).deadline_ms is None


def sampling(**changes: Any) -> dict[str, Any]:
    return {"sampling": common_pb2.SamplingParams(max_tokens=3, **changes)}


def f32s(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (False, False)),
        ({"presence_penalty": 0.0, "repetition_penalty": 1.0}, (False, False)),
        ({"presence_penalty": 0.1}, (True, False)),
        ({"frequency_penalty": -0.1}, (True, False)),
        ({"repetition_penalty": 1.1}, (True, False)),
        ({"bad_words": [ids(4)], "logit_bias_ids": ids(1), "logit_bias_values": f32s(2)}, (0, 0)),
        ({"bad_words": [ids(4, 5)], "allowed_token_ids": ids(1)}, (True, False)),
        ({"prompt_logprobs": 0}, (False, True)),
    ],
)
def test_what_the_scheduler_reads_of_the_rules(
    changes: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    submission = submission_from_proto(submit(**sampling(**changes)), MODEL)
    assert (submission.needs_history, submission.wants_prompt_logprobs) == expected


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"min_tokens": 4}, "min_tokens"),
        ({"min_tokens": 2**32 - 1}, "min_tokens"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"frequency_penalty": float("-inf")}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"logit_bias_ids": ids(1, 2), "logit_bias_values": f32s(1)}, "logit_bias"),
        ({"logit_bias_ids": ids(1000), "logit_bias_values": f32s(1)}, "logit_bias"),
        ({"logit_bias_ids": ids(1), "logit_bias_values": f32s(np.inf)}, "logit_bias"),
        ({"allowed_token_ids": ids(1000)}, "allowed_token_ids"),
        ({"allowed_token_ids": b"abc"}, "allowed_token_ids"),
        ({"bad_words": [b""]}, "bad_words"),
        ({"bad_words": [ids(1), ids(1, 1000)]}, "bad_words"),
        ({"bad_words": [ids(*range(257))]}, "bad_words"),
        ({"bad_words": [ids(1)] * 257}, "bad_words"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_a_rule_that_could_fail_a_row_is_refused(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        submission_from_proto(submit(**sampling(**changes)), MODEL)
    assert caught.value.param == param


def test_a_frame_carries_prompt_logprobs() -> None:
    entries = [common_pb2.TokenLogprobs(logprob=-0.5, rank=3)]
    frame = Frame(prompt_logprobs=[PromptLogprobsNote(7, 33, entries)])
    message = frame_to_proto(
        frame, LoadNumbers(0, 0, 0, 0, 0, 0, draining=False, prompt_backlog_tokens=0)
    )
    (batch,) = message.prompt_logprobs
    assert (batch.handle, batch.start) == (7, 33)
    assert list(batch.entries) == entries


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt_token_ids": b""}, "prompt"),
        ({"prompt_token_ids": b"abc"}, "prompt_token_ids"),
        ({"prompt_token_ids": ids(1000), "block_hashes": b""}, "prompt_token_ids"),
        ({"root_hash": b"short"}, "root_hash"),
        ({"block_hashes": bytes(16)}, "block_hashes"),
        ({"block_hashes": bytes(48)}, "block_hashes"),
        ({"num_sequences": 0}, "n"),
        ({"num_sequences": 129}, "n"),
        ({"sampling": common_pb2.SamplingParams()}, "max_tokens"),
        ({"sampling": common_pb2.SamplingParams(max_tokens=1, stop_token_ids=b"x")}, None),
        ({"resumes": [resume(2)]}, "resumes"),
        ({"resumes": [resume(0), resume(0)]}, "resumes"),
        ({"resumes": [resume(0, 1, 2, 3, 4, 5, 6)]}, "resumes"),
        ({"resumes": [resume(0, 1000)]}, "resumes"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        submission_from_proto(submit(**changes), MODEL)
    assert caught.value.param == (param or "stop_token_ids")
