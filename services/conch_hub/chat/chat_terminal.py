"""A chat in a terminal: prompts with a history, answers as they come, and commands that begin with a slash.

Ctrl-C cancels an answer; at the prompt it ends the chat, as Ctrl-D does.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from conch_hub.chat.answer_view import answer_view, has_rich
from conch_hub.chat.conversation import ChatError, Conversation
from conch_hub.safe_text import safe

_PROMPT = ">>> "
_COMMAND = re.compile(r"/([a-z]*)(?:\s+(.*))?", re.DOTALL)
_MOST_HISTORY = 1000
_HELP = """\
/system TEXT  begin again with a system prompt; without a text, with none
/save FILE    write the chat, as Markdown, or as JSON to a name with .json
/clear        begin again, with the same system prompt
/help         this text
/exit         end, as Ctrl-D
Ctrl-C cancels an answer; at the prompt it ends the chat."""


class ChatTerminal:
    """A chat on standard input and output.

    Args:
        conversation: The chat.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._chat = conversation

    def run(self) -> None:
        """Talks until the user ends."""
        rich = "" if has_rich() else "; pip install 'conch[chat]' for Markdown"
        print(f"/help for commands, Ctrl-D ends{rich}")
        with prompt_history(os.environ):
            while True:
                try:
                    text = input(_PROMPT).strip()
                    text.encode()
                except (EOFError, KeyboardInterrupt):
                    print()
                    return
                except UnicodeError:
                    print("the prompt is no text in UTF-8")
                    continue
                command = _COMMAND.fullmatch(text)
                if command is None:
                    if text:
                        self._answer(text)
                elif not self._obey(command[1], command[2] or ""):
                    return

    def _answer(self, prompt: str) -> None:
        try:
            # Closed at once, which cancels the answer.
            with answer_view() as view, closing(self._chat.ask(prompt)) as pieces:
                for piece in pieces:
                    if piece.reasoning:
                        view.reason(piece.reasoning)
                    if piece.text:
                        view.add(piece.text)
        except KeyboardInterrupt:
            print("(cancelled)")
            return
        except ChatError as error:
            print(f"conch run: {safe(str(error))}; /clear begins again", file=sys.stderr)
            return
        print(self._summary())

    def _summary(self) -> str:
        figures = self._chat.figures
        later_s = figures.seconds - figures.first_s
        rate = (
            f", {(figures.tokens - 1) / later_s:.1f} tokens/s" if figures.tokens > 1 and later_s > 0 else ""
        )
        cut = ", cut: the context or the limit of tokens is full" if figures.finish == "length" else ""
        return f"({figures.tokens} tokens, the first after {figures.first_s:.2f} s{rate}{cut})"

    def _obey(self, command: str, text: str) -> bool:
        """Runs a command; False if it ends the chat."""
        if command == "exit":
            return False
        if command == "system":
            self._chat.begin(text)
            print("a new chat with this system prompt" if text else "a new chat without a system prompt")
        elif command == "clear":
            self._chat.begin(self._chat.system)
            print("a new chat")
        elif command == "save" and text:
            print(save_chat(self._chat, text))
        elif command == "save":
            print("/save needs the name of a file")
        else:
            print(_HELP if command == "help" else f"there is no /{command}\n{_HELP}")
        return True


def save_chat(conversation: Conversation, name: str) -> str:
    """Writes a chat to a new file; returns a sentence on that."""
    path = Path(os.path.expanduser(name))
    if path.suffix == ".json":
        text = json.dumps(conversation.messages, ensure_ascii=False, indent=1) + "\n"
    else:
        text = "\n\n".join(f"## {each['role']}\n\n{each['content']}" for each in conversation.messages) + "\n"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        return f"'{path}' can't be written: {error.strerror}"
    return f"wrote {path}"


@contextmanager
def prompt_history(environment: Mapping[str, str]) -> Iterator[None]:
    """Keys that edit prompts and find earlier ones, for a block; the file is for its owner only."""
    try:
        import readline
    except ImportError:  # a Python that was built without it
        yield
        return
    base = environment.get("XDG_STATE_HOME") or Path(
        environment.get("HOME") or Path.home(), ".local", "state"
    )
    path = Path(base, "conch", "chat_history")
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_MOST_HISTORY)
    try:
        yield
    finally:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            readline.write_history_file(path)
