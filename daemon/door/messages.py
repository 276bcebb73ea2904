"""The messages that callers sent lately, and what became of each of their actions. Any thread may call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...shmring.wire.admin import AnnounceStep, Caller
from .envelope import Answer, Answered, Blocks

MAX_ANSWERS = 16_384  # of one user, kept, over or not: an answer has about a kilobyte


@dataclass(eq=False)
class Message:
    message_id: str
    caller: int
    body: bytes  # its digest
    answers: list[Answered]

    def tell(self, action: int, **fields: object) -> None:
        """Change these fields of the answer to an action."""
        self.answers[action] = self.answers[action].model_copy(update=fields)

    def answer(self) -> Answer:
        return Answer(message_id=self.message_id, actions=list(self.answers))


class Messages:
    """Keeps the newest messages. The daemon's outcomes find theirs by number."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: dict[int, dict[str, Message]] = {}  # by user and id, the oldest first
        # Of announcements that are not over: the action of a message, and the bytes of its engine's blocks.
        self._numbers: dict[int, tuple[Message, int, int]] = {}
        self._last = 0

    def get(self, caller: Caller, message_id: str) -> Message | None:
        """Return this user's message of that id; None where it never came, or was forgotten."""
        with self._changed:
            return self._messages.get(caller.uid, {}).get(message_id)

    def add(self, caller: Caller, message_id: str, body: bytes, answers: list[Answered]) -> Message:
        """Keep a new message, by the digest of its body, with the first answers to its actions."""
        new = Message(message_id, caller.uid, body, answers)
        with self._changed:
            kept = self._messages.setdefault(caller.uid, {})
            kept[message_id] = new
            while sum(len(each.answers) for each in kept.values()) > MAX_ANSWERS:
                self._drop(next(iter(kept.values())))
        return new

    def forget(self, message: Message) -> None:
        """Drop a message of which nothing was announced: its id may come again."""
        with self._changed:
            self._drop(message)

    def _drop(self, message: Message) -> None:
        kept = self._messages[message.caller]
        if kept.get(message.message_id) is message:  # else one of the same id came at the same time
            del kept[message.message_id]
        self._numbers = {number: at for number, at in self._numbers.items() if at[0] is not message}

    def number(self, message: Message, action: int, block_bytes: int) -> int:
        """Return the number by which the daemon's outcomes name this action of a message."""
        with self._changed:
            self._last += 1
            self._numbers[self._last] = message, action, block_bytes
            return self._last

    def note(self, outcome: AnnounceStep) -> None:
        with self._changed:
            if (at := self._numbers.get(outcome.number)) is None:
                return
            message, action, block_bytes = at
            blocks = {name: getattr(outcome, name) for name in Blocks.model_fields if name != "missing"}
            message.tell(
                action,
                outcome=outcome.outcome,
                reason=outcome.reason or message.answers[action].reason,
                blocks=Blocks(missing=outcome.absent, **blocks),
                bytes=outcome.started * block_bytes,
            )
            if outcome.last:
                del self._numbers[outcome.number]
            self._changed.notify_all()

    def wait(self, message: Message, ready: Callable[[Answered], bool], most_s: float) -> Answer:
        """Return the answer once each action is `ready`, or at the end of this time."""
        until = time.monotonic() + most_s
        with self._changed:
            while not all(map(ready, message.answers)) and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            return message.answer()
