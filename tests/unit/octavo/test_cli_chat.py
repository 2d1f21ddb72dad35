"""octavo.cli.chat in a pipe, and its parts: conversation, client, URLs."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli import main as run_cli
from octavo.cli.conversation import Conversation
from octavo.cli.openai_url import api_base, api_key, split_label
from octavo.errors import ConfigurationError
from tests.fakes.openai_server import Body, OpenAiServer, Reply


def _chat(
    monkeypatch: pytest.MonkeyPatch, server: OpenAiServer, text: str, *flags: str
) -> tuple[int, list[list[Body]]]:
    """Run the command with `text` as its stdin; the status, and the messages of each request."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    first = len(server.bodies)
    status = run_cli(["chat", "--url", server.url, *flags])
    return status, [body["messages"] for body in server.bodies[first:]]


def _user(text: str) -> Body:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Body:
    return {"role": "assistant", "content": text}


HELLO = _assistant("Hello world")


def test_a_pipe_asks_line_by_line_and_gets_the_answers_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with OpenAiServer(models=["first", "second"]) as server:
        status, asked = _chat(monkeypatch, server, "one\n\n  two  \n", "--system", "be brief")
    assert status == 0
    system = {"role": "system", "content": "be brief"}
    assert asked == [
        [system, _user("one")],
        [system, _user("one"), HELLO, _user("two")],
    ]
    assert capsys.readouterr() == ("Hello world\nHello world\n", "")
    assert server.bodies[0].keys() == {"model", "messages", "stream", "stream_options"}
    assert server.bodies[0]["model"] == "first"
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


def test_a_prompt_as_argument_is_asked_alone_with_the_given_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", "x", "--temperature", "0", "--top-p", "0.5", "--seed", "7"]
    flags += ["--max-tokens", "9", "--api-key", "k"]
    with OpenAiServer(api_key="k") as server:
        status, asked = _chat(monkeypatch, server, "not read\n", *flags, "what?")
    assert (status, asked) == (0, [[_user("what?")]])
    options = {"model": "x", "temperature": 0.0, "top_p": 0.5, "seed": 7, "max_tokens": 9}
    assert server.bodies[0].items() >= options.items()
    assert capsys.readouterr().out == "Hello world\n"


@pytest.mark.parametrize("text", ["/exit", "//x", "two\nlines", " a "])
def test_an_argument_is_never_a_command_and_a_dash_takes_all_of_stdin(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OpenAiServer() as server:
        assert _chat(monkeypatch, server, "", text) == (0, [[_user(text.strip())]])
        assert _chat(monkeypatch, server, text, "-") == (0, [[_user(text.strip())]])


def test_commands_change_the_conversation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "talk.md"
    script = [
        *("one", "/retry", "/system be odd", "/clear", "two", "/system -", "//three"),
        *(f"/save {saved}", "/exit", "never"),
    ]
    with OpenAiServer() as server:
        status, asked = _chat(monkeypatch, server, "\n".join(script))
    odd = {"role": "system", "content": "be odd"}
    assert status == 0
    assert asked == [
        [_user("one")],
        [_user("one")],
        [odd, _user("two")],
        [_user("two"), HELLO, _user("/three")],
    ]
    assert saved.read_text() == (
        "## user\n\ntwo\n\n## assistant\n\nHello world\n\n"
        "## user\n\n/three\n\n## assistant\n\nHello world\n"
    )
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("/retry", "there is no question to ask again"),
        ("/save x.md", "nothing was said yet"),
        ("one\n/save", "/save needs a file name"),
        ("one\n/save /", "/ is there already: choose another name"),
        ("one\n/save /absent/x.md", "can't write /absent/x.md: No such file or directory"),
        ("/foo", "no command /foo; /help lists them, //... sends a text"),
    ],
)
def test_a_failed_command_ends_a_pipe_with_its_reason(
    script: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with OpenAiServer() as server:
        assert _chat(monkeypatch, server, f"{script}\nafter\n")[0] == 1
    assert capsys.readouterr().err == f"octavo chat: {message}\n"


@pytest.mark.parametrize(
    ("reply", "shown", "message"),
    [
        (
            Reply(status=400, body={"error": {"message": "too long"}}),
            "",
            "the server answers 400: too long",
        ),
        (
            Reply(status=502, body={"detail": "x"}),
            "",
            'the server answers 502: {"detail": "x"}',
        ),
        (
            Reply(raw_end=b'data: {"error": {"message": "worker gone"}}\n\n'),
            "Hello world\n",
            "the answer failed: worker gone",
        ),
        (Reply(raw_end=b""), "Hello world\n", "lost the server at "),
        (Reply(raw_end=b"", is_cut=False), "Hello world\n", "the server broke the answer off"),
        (Reply(raw_end=b"data: oops\n\n"), "Hello world\n", "the server sent what is no JSON"),
        (Reply(raw_end=b"data: 3\n\n"), "Hello world\n", "the server sent no JSON object"),
    ],
)
def test_a_failed_answer_ends_a_pipe_with_its_reason(
    reply: Reply,
    shown: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with OpenAiServer(lambda _: reply) as server:
        status, asked = _chat(monkeypatch, server, "one\ntwo\n")
    assert (status, len(asked)) == (1, 1)
    out, err = capsys.readouterr()
    assert out == shown
    assert err.startswith(f"octavo chat: {message}")
    assert err.count("\n") == 1


def test_no_server_no_key_no_model_are_said_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    assert run_cli(["chat", "--url", "127.0.0.1:1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("octavo chat: no server answers at http://127.0.0.1:1/v1 (")
    assert "`octavo serve`" in error
    with OpenAiServer(api_key="k", models=()) as server:
        assert run_cli(["chat", "--url", server.url]) == 2
        assert "401: wrong key (give --api-key" in capsys.readouterr().err
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        assert run_cli(["chat", "--url", server.url]) == 2
        assert "serves no model" in capsys.readouterr().err
    assert run_cli(["chat", "--url", "ftp://x"]) == 2
    assert "--url 'ftp://x': must be like http://host:port" in capsys.readouterr().err


def test_a_reader_that_has_gone_ends_it_quietly() -> None:
    with OpenAiServer() as server:
        command = f"{sys.executable} -m octavo chat --url {server.url} hello | true"
        ended = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {command}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (1, "")


def test_an_unanswered_question_gives_way_but_can_be_asked_again(tmp_path: Path) -> None:
    talk = Conversation()
    assert not talk.retry()
    talk.ask("a")
    assert talk.retry()
    assert talk.messages == [_user("a")]
    talk.ask("b")
    assert talk.messages == [_user("b")]
    talk.answer("B")
    talk.system = "s"
    file = tmp_path / "talk.json"
    talk.save(file)
    assert json.loads(file.read_text()) == talk.messages
    assert talk.messages == [{"role": "system", "content": "s"}, _user("b"), _assistant("B")]
    with pytest.raises(FileExistsError):
        talk.save(file)
    assert talk.retry()
    assert talk.messages[-1] == _user("b")
    talk.clear()
    assert talk.is_empty
    assert talk.messages == [{"role": "system", "content": "s"}]


def test_urls_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert api_base("localhost:8000") == "http://localhost:8000/v1"
    assert api_base("http://h/") == "http://h/v1"
    assert api_base("https://h:1/v1/") == "https://h:1/v1"
    assert api_base("https://h/openai/v2") == "https://h/openai/v2"
    for wrong in ("", "ftp://h", "http://", "http://h:x", "h:0", "http://h:99999"):
        with pytest.raises(ConfigurationError, match="--url"):
            api_base(wrong)
    assert split_label("a=http://h") == ("a", "http://h")
    assert split_label("http://h/?x=1") == ("http://h/?x=1", "http://h/?x=1")
    for name in ("OCTAVO_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert api_key(None) is None
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    assert api_key(None) == "other"
    monkeypatch.setenv("OCTAVO_API_KEY", "own")
    assert api_key(None) == "own"
    assert api_key("given") == "given"
