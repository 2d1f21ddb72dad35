"""`octavo chat`: talk to a model in the terminal, or from a pipe, over the OpenAI API.

Read first: `Chat`. Must not know: Octavo's services; any OpenAI-compatible server will do.
Entry point: `main`.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from octavo.cli.chat_client import AnswerStream, ChatClient
from octavo.cli.chat_input import TerminalInput, lines_of
from octavo.cli.chat_screen import PlainScreen, Screen, TerminalScreen
from octavo.cli.conversation import Conversation
from octavo.cli.openai_url import DEFAULT_URL, api_base, api_key
from octavo.errors import OctavoError
from octavo.hub import cache_folder

COMMANDS = {
    "/clear": "forget the conversation (the system prompt stays)",
    "/system": "[TEXT]  show or set the system prompt ('-' removes it)",
    "/save": "FILE  write the conversation (.json: messages, else Markdown)",
    "/retry": "ask the last question again",
    "/help": "this list",
    "/exit": "leave (so does Ctrl-D)",
}
_HINT = "A line ending in \\ goes on in the next; // at its start sends a text that begins with /."


def main(argv: list[str] | None = None) -> int:
    """Chat until the input ends. Status 1 if a piped question failed, 2 if no server is there."""
    arguments = _parse(argv)
    is_interactive = arguments.prompt is None and sys.stdin.isatty() and sys.stdout.isatty()
    screen = TerminalScreen() if sys.stdout.isatty() and not arguments.plain else PlainScreen()
    with ChatClient(api_base(arguments.url), api_key(arguments.api_key)) as client:
        model = arguments.model or _first(client.models(), client.base)
        chat = Chat(client, screen, {"model": model, **_sampling(arguments)}, arguments.system)
        if is_interactive:
            screen.greet(model, client.base)
            chat.run(TerminalInput(cache_folder() / "chat_history", COMMANDS))
            return 0
        try:
            if arguments.prompt is None:
                return chat.run(lines_of(sys.stdin), stop_at_failure=True)
            whole = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
            return chat.run([_as_text(whole)], stop_at_failure=True)
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:
            # Whoever read the answers has gone; at the end Python must not write to them either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1


class Chat:
    """One conversation: questions and commands in, answers out."""

    def __init__(
        self, client: ChatClient, screen: Screen, options: dict[str, Any], system: str | None
    ) -> None:
        """`options`: fields of every request (model, temperature, ...)."""
        self._client = client
        self._screen = screen
        self._options = options
        self._conversation = Conversation(system)
        self._commands: dict[str, Callable[[str], None]] = {
            "/clear": self._clear,
            "/system": self._system,
            "/save": self._save,
            "/retry": self._retry,
            "/help": self._help,
        }

    def run(self, questions: Iterable[str], *, stop_at_failure: bool = False) -> int:
        """Answer until the questions end or /exit; 1 if one failed, which may end it at once."""
        for line in questions:
            text = line.strip()
            if text in ("/exit", "/quit"):
                break
            if not text:
                continue
            try:
                self._handle(text)
            except OctavoError as error:
                self._screen.error(error.message)
                if stop_at_failure:
                    return 1
            except KeyboardInterrupt:
                if stop_at_failure:
                    raise
        return 0

    def _handle(self, text: str) -> None:
        if text.startswith("/") and not text.startswith("//"):
            name, _, rest = text.partition(" ")
            if name not in self._commands:
                raise OctavoError(f"no command {name}; /help lists them, //... sends a text")
            self._commands[name](rest.strip())
            return
        self._conversation.ask(text.removeprefix("/") if text.startswith("//") else text)
        self._answer()

    def _answer(self) -> None:
        """Stream the answer to the last question. What was shown is kept, stopped or not."""
        said: list[str] = []
        body = {**self._options, "messages": self._conversation.messages}
        try:
            with self._client.answer(body) as stream:
                self._show(stream, said)
        except KeyboardInterrupt:
            if not said:
                self._screen.note("stopped")
            raise
        finally:
            if said:
                self._conversation.answer("".join(said))

    def _show(self, stream: AnswerStream, said: list[str]) -> None:
        def told() -> Iterator[str]:
            for piece in stream:
                said.append(piece)
                yield piece

        end = ""
        try:
            self._screen.answer(told())
        except KeyboardInterrupt:
            end = " · stopped"
            raise
        finally:
            if said:
                self._screen.note(summary(stream) + end)

    def _clear(self, rest: str) -> None:
        del rest
        self._conversation.clear()
        self._screen.note("cleared")

    def _system(self, rest: str) -> None:
        if rest:
            self._conversation.system = None if rest == "-" else rest
        self._screen.note(f"system prompt: {self._conversation.system or 'none'}")

    def _save(self, rest: str) -> None:
        if not rest:
            raise OctavoError("/save needs a file name")
        if self._conversation.is_empty:
            raise OctavoError("nothing was said yet")
        path = Path(rest).expanduser()
        try:
            self._conversation.save(path)
        except FileExistsError:
            raise OctavoError(f"{path} is there already: choose another name") from None
        except OSError as error:
            raise OctavoError(f"can't write {path}: {error.strerror}") from error
        self._screen.note(f"saved to {path}")

    def _retry(self, rest: str) -> None:
        del rest
        if not self._conversation.retry():
            raise OctavoError("there is no question to ask again")
        self._answer()

    def _help(self, rest: str) -> None:
        del rest
        lines = [f"  {name:<8} {text}" for name, text in COMMANDS.items()]
        self._screen.note("\n".join([*lines, f"  {_HINT}"]))


def summary(stream: AnswerStream) -> str:
    """One line of numbers about an answer."""
    tokens = "token" if stream.num_tokens == 1 else "tokens"
    parts = [f"{stream.num_tokens} {tokens}"]
    if stream.tokens_per_s is not None:
        parts.append(f"{stream.tokens_per_s:.1f} tokens/s")
    parts.append(f"first after {1e3 * stream.ttft_s:.0f} ms")
    if stream.num_prompt_tokens is not None:
        cached = f" ({stream.num_cached_tokens} cached)" if stream.num_cached_tokens else ""
        parts.append(f"prompt {stream.num_prompt_tokens}{cached}")
    if stream.finish_reason == "length":
        parts.append("cut at the limit of tokens")
    return " · ".join(parts)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="octavo chat",
        description="Chat with a model behind any OpenAI-compatible API.",
        epilog="In a pipe: each line of stdin is a question, stdout gets the answers alone.",
    )
    parser.add_argument(
        "prompt", nargs="?", help="ask this, print the answer, and end; - asks all of stdin"
    )
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server [{DEFAULT_URL}]")
    parser.add_argument("--model", help="the model's name [the first that the server lists]")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--temperature", type=float, help="0 is greedy [the server's default]")
    parser.add_argument("--top-p", type=float, help="nucleus sampling [the server's default]")
    parser.add_argument("--seed", type=int, help="draw the same answer again")
    parser.add_argument("--max-tokens", type=int, help="longest answer [the server's default]")
    parser.add_argument("--api-key", help="[$OCTAVO_API_KEY or $OPENAI_API_KEY]")
    parser.add_argument("--plain", action="store_true", help="show answers unformatted")
    return parser.parse_args(argv)


def _as_text(question: str) -> str:
    """A question that is no command, whatever it begins with."""
    question = question.strip()
    return f"/{question}" if question.startswith("/") else question


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was asked for; the rest is the server's to choose."""
    names = ("temperature", "top_p", "seed", "max_tokens")
    given = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def _first(models: list[str], base: str) -> str:
    if not models:
        raise OctavoError(f"{base} serves no model")
    return models[0]
