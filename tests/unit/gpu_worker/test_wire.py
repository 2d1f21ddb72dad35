"""Plans and results as messages: everything arrives, and what can't be read is refused."""

import numpy as np
import pytest

from octavo.errors import FailedPreconditionError
from octavo.v1 import common_pb2, worker_pb2
from octavo_worker.plan import PromptLogprobs, Sampling, StepOutcome
from octavo_worker.wire import plan_from_proto, results_to_proto


def u32s(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def plan_of(sampling: common_pb2.SamplingParams) -> worker_pb2.Plan:
    add = worker_pb2.RowAdd(
        row=3, sampling=sampling, history_token_ids=u32s(5, 6, 7), num_prompt_tokens=2
    )
    return worker_pb2.Plan(plan_id=1, added_rows=[add])


def test_every_sampling_parameter_arrives() -> None:
    message = common_pb2.SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        min_p=0.125,
        seed=2**64 - 1,
        stop_token_ids=u32s(2, 3),
        logprobs=0,
        presence_penalty=-0.5,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        logit_bias_ids=u32s(8, 9),
        logit_bias_values=np.array([1.5, -100.0], "<f4").tobytes(),
        allowed_token_ids=u32s(8, 9, 10),
        bad_words=[u32s(8), u32s(9, 10)],
        prompt_logprobs=3,
    )
    (add,) = plan_from_proto(plan_of(message)).added_rows
    assert add.sampling == Sampling(
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        min_p=0.125,
        seed=2**64 - 1,
        stop_token_ids=(2, 3),
        logprobs=0,
        presence_penalty=-0.5,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        logit_bias_ids=(8, 9),
        logit_bias_values=(1.5, -100.0),
        allowed_token_ids=(8, 9, 10),
        bad_words=((8,), (9, 10)),
        prompt_logprobs=3,
    )
    assert (add.history_token_ids.tolist(), add.num_prompt_tokens) == ([5, 6, 7], 2)


def test_absent_parameters_are_off() -> None:
    (add,) = plan_from_proto(plan_of(common_pb2.SamplingParams(temperature=1.0))).added_rows
    assert add.sampling == Sampling(temperature=1.0)
    assert not add.sampling.has_bias
    assert not add.sampling.needs_history


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias_ids", b"abc"),
        ("logit_bias_values", b"abcde"),
        ("allowed_token_ids", b"a"),
        ("bad_words", [u32s(1), b"ab"]),
    ],
)
def test_broken_lists_are_refused_by_name(name: str, value: bytes | list[bytes]) -> None:
    message = common_pb2.SamplingParams(**{name: value})
    with pytest.raises(FailedPreconditionError, match=name):
        plan_from_proto(plan_of(message))


def test_prompt_logprobs_go_out_token_by_token() -> None:
    none = np.empty(0, np.uint32)
    piece = PromptLogprobs(
        row=3,
        generation=9,
        start=17,
        logprobs=[-0.5, -2.0],
        ranks=[0, 4],
        top_token_ids=np.array([[1, 2], [3, 4]], np.uint32),
        top_logprobs=np.array([[-0.5, -1.0], [-0.25, -1.5]], np.float32),
    )
    outcome = StepOutcome(
        step=1,
        plan_id=1,
        repeat=0,
        rows=none,
        generations=none,
        token_ids=none,
        events=np.empty(0, np.uint8),
        logprobs=(),
        faults=(),
        num_prefill_tokens=2,
        num_decode_tokens=0,
        wait_us=0,
        step_us=1,
        prompt_logprobs=(piece,),
    )
    (result,) = results_to_proto([outcome]).results.results
    (item,) = result.prompt_logprobs
    assert (item.row, item.generation, item.start) == (3, 9, 17)
    first, second = item.entries
    assert (first.logprob, first.rank, second.logprob, second.rank) == (-0.5, 0, -2.0, 4)
    assert second.top_token_ids == u32s(3, 4)
    assert np.frombuffer(second.top_logprobs, "<f4").tolist() == [-0.25, -1.5]
