"""The API's document against the service: what it allows is sent, and what it does not."""

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
)

from tests.e2e.edge import AUTHORIZATION, full_logs, resident_mib
from tests.e2e.stack import Stack, total
from tests.e2e.test_json_fuzz import MAX_GROWTH_MIB, check_answer

TIMEOUT_S = 30
CHECKS = [not_a_server_error, response_schema_conformance, content_type_conformance]


def load_schema(stack: Stack) -> BaseSchema:
    document = httpx.get(f"{stack.url}/openapi.json", headers=AUTHORIZATION).json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=stack.url)
    return schema


def drive(stack: Stack, num_examples: int) -> set[str]:
    """`num_examples` of every operation, lawful and not; the operations that were driven."""
    driven: set[str] = set()
    with requests.Session() as session:
        for result in load_schema(stack).get_all_operations():
            operation = result.ok()
            strategy = st.one_of(
                operation.as_strategy(),
                operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE),
            )
            driven.add(operation.label)
            send_all(session, strategy, num_examples)
    return driven


def send_all(session: requests.Session, strategy: st.SearchStrategy, num_examples: int) -> None:
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def send(case: schemathesis.Case) -> None:
        answer = case.call(session=session, headers=dict(AUTHORIZATION), timeout=TIMEOUT_S)
        kind = answer.headers.get("content-type", [""])[0]
        if kind.startswith(("application/json", "text/event")):
            check_answer(answer.status_code, kind, answer.content)
        case.validate_response(answer, checks=CHECKS)

    send()


def check(stack: Stack, num_examples: int) -> None:
    process_id = stack.routers[0].process.pid
    before_mib = resident_mib(process_id)
    driven = drive(stack, num_examples)
    assert {"POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models"} <= driven
    stack.wait_idle(60)
    assert total(stack.router_metrics(), "octavo_requests_in_flight") == 0
    assert resident_mib(process_id) - before_mib < MAX_GROWTH_MIB
    assert "Traceback" not in full_logs(stack)


def test_the_service_keeps_its_document(edge_stack: Stack) -> None:
    check(edge_stack, 10)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_service_keeps_its_document_for_long(edge_stack: Stack) -> None:
    check(edge_stack, 300)
