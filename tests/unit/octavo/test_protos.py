"""The contract's files: stubs are those of the protos, and the rules of the house hold in them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FileDescriptor
from grpc_tools import protoc

from octavo.v1 import common_pb2, inference_pb2, scheduler_pb2, worker_pb2

PROTOS = Path(__file__).parents[3] / "protos"
SOURCES = sorted((PROTOS / "octavo" / "v1").glob("*.proto"))
FILES: tuple[FileDescriptor, ...] = tuple(
    module.DESCRIPTOR for module in (common_pb2, inference_pb2, scheduler_pb2, worker_pb2)
)
# Committed under other names than protoc's output would have.
HANDWRITTEN = {"__init__.py"}


def messages() -> Iterator[Descriptor]:
    """Every message, nested ones too."""
    waiting = [message for file in FILES for message in file.message_types_by_name.values()]
    while waiting:
        message = waiting.pop()
        yield message
        waiting += message.nested_types


def test_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    status = protoc.main(["protoc", f"-I{PROTOS}", *outputs, *map(str, SOURCES)])
    assert status == 0
    made = {path.name: path.read_bytes() for path in (tmp_path / "octavo" / "v1").iterdir()}
    committed = {
        path.name: path.read_bytes()
        for path in (PROTOS / "octavo" / "v1").iterdir()
        if path.suffix in (".py", ".pyi") and path.name not in HANDWRITTEN
    }
    assert set(made) == set(committed)
    stale = [name for name, data in made.items() if data != committed[name]]
    assert stale == [], "run `make protos`"


def test_the_package_and_its_services_keep_their_names() -> None:
    methods = {
        service.full_name: [method.name for method in service.methods]
        for file in FILES
        for service in file.services_by_name.values()
    }
    assert methods == {
        "octavo.v1.Inference": ["Generate", "Tokenize", "Detokenize", "ListModels"],
        "octavo.v1.Scheduler": ["Session", "Describe", "Drain", "Watch"],
        "octavo.v1.Worker": ["Describe", "Attach", "Steps"],
    }


def test_every_rpc_has_a_request_and_a_response_of_its_own() -> None:
    used = [
        message.full_name
        for file in FILES
        for service in file.services_by_name.values()
        for method in service.methods
        for message in (method.input_type, method.output_type)
    ]
    assert len(set(used)) == len(used)
    assert all(name.endswith(("Request", "Response")) for name in used)


def test_enum_zero_means_unspecified() -> None:
    enums = [enum for file in FILES for enum in file.enum_types_by_name.values()]
    enums += [enum for message in messages() for enum in message.enum_types]
    assert enums
    for enum in enums:
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
        assert enum.values_by_number[0].name == f"{prefix}_UNSPECIFIED"
        assert all(value.name.startswith(f"{prefix}_") for value in enum.values)


def test_no_sampling_parameter_has_a_default() -> None:
    fields = common_pb2.SamplingParams.DESCRIPTOR.fields
    assert len(fields) > 5
    for field in fields:
        # A list says all with its length; a number must be able to be absent.
        is_list = field.is_repeated or field.type == field.TYPE_BYTES
        assert field.has_presence or is_list, field.name


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (scheduler_pb2, "SessionHello"),
        (scheduler_pb2, "SessionWelcome"),
        (scheduler_pb2, "SchedulerDescribeResponse"),
        (worker_pb2, "WorkerDescribeResponse"),
        (worker_pb2, "WorkerAttachRequest"),
    ],
)
def test_every_handshake_carries_the_wire_version(module, name: str) -> None:
    assert "wire_version" in getattr(module, name).DESCRIPTOR.fields_by_name
