"""What was said in a chat: system prompt, questions and answers in turn.

No I/O but `save`. Entry point: `Conversation`.
"""

import json
from pathlib import Path

Message = dict[str, str]


class Conversation:
    """Turns of a user and an assistant. The last question may have no answer (yet)."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """As the API takes them."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self._turns]

    @property
    def is_empty(self) -> bool:
        return not self._turns

    @property
    def awaits_answer(self) -> bool:
        """The last turn is a question."""
        return bool(self._turns) and self._turns[-1]["role"] == "user"

    def ask(self, text: str) -> None:
        """The user's turn. A question that got no answer gives way to this one."""
        if self.awaits_answer:
            self._turns.pop()
        self._turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """The assistant's turn, also one that was stopped early."""
        assert self.awaits_answer, "an answer follows a question"
        self._turns.append({"role": "assistant", "content": text})

    def retry(self) -> bool:
        """Take the last answer back, so that its question is asked again; False if none is."""
        if self._turns and not self.awaits_answer:
            self._turns.pop()
        return self.awaits_answer

    def clear(self) -> None:
        """Forget all turns; the system prompt stays."""
        self._turns.clear()

    def save(self, path: Path) -> None:
        """Write to a new file: messages as JSON if its name ends so, else Markdown.

        Raises OSError (FileExistsError too: nothing is overwritten).
        """
        with path.open("x", encoding="utf-8") as file:
            file.write(self._json() if path.suffix == ".json" else self._markdown())

    def _json(self) -> str:
        return json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n"

    def _markdown(self) -> str:
        parts = (f"## {item['role']}\n\n{item['content'].strip()}\n" for item in self.messages)
        return "\n".join(parts)
