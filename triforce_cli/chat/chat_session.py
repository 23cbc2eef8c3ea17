"""A conversation with a loaded model: asks, keeps what was said, and reads ahead."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from offload.events import Prefilled
from offload.metrics import Summary
from offload.units import counted

from ..output.renderers import Renderer, tokenizing
from ..output.statistics import reading
from ..run.model_request import ModelRequest, Prompt
from ..run.prompt_cache import LABEL
from ..run.text_generator import TextGenerator, TextRun
from .conversation import Answer, Conversation, Room, save_conversation
from .replies import Replies

ANY_QUESTION = "?"  # to count tokens with: some templates take no empty message
_MOST_UNSHOWN = 64  # tokens at the end of an answer that its text may lack


def ids_of_text(ids: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]) -> tuple[int, ...] | None:
    """Return as many of the tokens that a model wrote as make up the text that was shown; None if none do.

    The last ones may be a stop string, or tokens whose text Ctrl-C has kept from being shown.
    """
    counts = range(len(ids), max(len(ids) - _MOST_UNSHOWN, -1), -1)
    return next((tuple(ids[:count]) for count in counts if decode(ids[:count]) == text), None)


def with_known_ids(conversation: Conversation, opened: ModelRequest) -> Conversation:
    """Return a saved conversation without the ids of answers that are not this model's tokens of their texts."""
    vocabulary, decode = opened.model.checkpoint.shape.vocab, opened.model.tokenizer.decode

    def known(answer: Answer) -> Answer:
        ids = answer.ids or ()
        is_known = all(0 <= each < vocabulary for each in ids) and decode(ids) == answer.text
        return answer if is_known else replace(answer, ids=None)

    return replace(conversation, turns=tuple(replace(turn, answer=known(turn.answer)) for turn in conversation.turns))


class ChatSession:
    """A conversation under way.

    Attributes:
        conversation: what the next prompt consists of; may be replaced at any time.
        saved: the conversation as it was last saved or loaded.
        unanswered: a question that was asked and has no answer, for lack of room or because of Ctrl-C.
        summary: the metrics of the last answer.
        encoding: of text files that are added; None guesses it.
    """

    def __init__(
        self,
        opened: ModelRequest,
        generator: TextGenerator,
        renderer: Renderer,
        replies: Replies,
        room: Room,
        conversation: Conversation,
        path: Path | None = None,
        encoding: str | None = None,
    ) -> None:
        """With a `path`, the conversation is saved there after each answer."""
        self.opened = opened  # the request, with the settings that hold now
        self._generator = generator
        self._renderer = renderer
        self.replies = replies
        self.room = room
        self.conversation = self.saved = conversation
        self._path = path
        self.encoding = encoding
        self.unanswered: str | None = None
        self.summary: Summary | None = None
        self._known: dict[tuple[str, bool], list[int]] = {}
        self._retries = 0
        self._used: tuple[Conversation, int] | None = None

    def set(self, options: Mapping[str, Any]) -> None:
        """Change settings of sampling and generation. Raises SettingsError."""
        seed = self.opened.settings.generation.seed
        self.opened = self.opened.overridden(options, lambda: seed)

    @property
    def used(self) -> int:
        """The tokens of the conversation so far. Raises PromptError."""
        if self._used is None or self._used[0] is not self.conversation:
            self._used = self.conversation, len(self._encode(self.conversation, ANY_QUESTION))
        return self._used[1]

    def ask(self, question: str) -> None:
        """Answer a question, and keep what was said, also after Ctrl-C; not the beginning of an answer that failed.

        Raises PromptError where there is no room for an answer, and as `TextGenerator.generate`.
        """
        self.unanswered, self._retries = question, 0
        self._answer(question)

    def retry(self) -> None:
        """Answer the last question, anew and with other draws if it has an answer. Raises as `ask`."""
        if self.unanswered is not None:
            self._answer(self.unanswered)
            return
        before, self._retries = self.conversation, self._retries + 1
        self.conversation = before.undone()
        if self.opened.sampling.greedy:
            self.replies.note("greedy decoding gives the same answer again; /set temperature 0.7 varies it")
        try:
            self._answer(before.turns[-1].question)
        finally:
            if len(self.conversation.turns) < len(before.turns):  # no new answer: keep the old one
                self.conversation = before

    def _answer(self, question: str) -> None:
        ids = self._encode(self.conversation, question)
        wanted = self.opened.settings.generation.max_new_tokens
        new_tokens = self.room.answer_tokens(len(ids), wanted)
        if not new_tokens:
            what = "the conversation and this question have"
            raise self.room.refusal(what, len(ids), self.conversation, "/retry")
        if new_tokens < wanted:
            choices = self.room.choices(self.conversation, wanted - new_tokens)
            left = f"the context leaves {counted(new_tokens, 'token')} for this answer, not {wanted:,}"
            self.replies.note(f"{left}: {choices}")
        prompt = Prompt(ids, new_tokens, self._name(question))
        self.replies.question(len(self.conversation.turns) + 1, question)
        self._generator.prepare(prompt, self._renderer)
        run = self._generator.begin(prompt, self._renderer, opened=self._request_of_answer())
        self._generator.run(run, lambda: self._keep(question, run))

    def check(self, conversation: Conversation) -> None:
        """Raise PromptError if a changed conversation leaves no room for a question and its answer."""
        tokens = len(self._encode(conversation, ANY_QUESTION))
        if not self.room.answer_tokens(tokens, self.opened.settings.generation.max_new_tokens):
            raise self.room.refusal("the conversation would have", tokens, self.conversation, "again")

    def resume(self, conversation: Conversation) -> None:
        """Go on with a saved conversation. Raises PromptError if it leaves no room."""
        conversation = with_known_ids(conversation, self.opened)
        self.check(conversation)
        self.conversation, self.saved, self.unanswered = conversation, conversation, None

    def change_system(self, text: str | None) -> None:
        """Change the system message, or remove it. Raises PromptError if the chat template takes none."""
        changed = replace(self.conversation, system=text)
        self.check(changed)
        self.conversation = changed

    def read_ahead(self) -> None:
        """Read what every next question begins with, so that it need not wait for the documents.

        Ctrl-C ends that; what was read stays.
        """
        shape = self.opened.model.checkpoint.shape
        if shape.rope_depends_on_length:  # the prompt of another length would be read anew
            return
        without = len(self._encode(Conversation(), ANY_QUESTION))
        ids = self._encode(self.conversation, ANY_QUESTION)[:-without]  # those that follow depend on the question
        if not ids:
            return
        prompt = Prompt(ids, 1, self._name(ANY_QUESTION))
        self._generator.prepare(prompt, self._renderer)
        run = self._generator.begin(prompt, self._renderer, opened=self.opened)
        with closing(self._generator.tokens(run)) as events:
            for event in events:
                run.observe(event)
                if isinstance(event, Prefilled) and event.done == len(ids):
                    break
        self._used = self.conversation, len(ids)
        if run.meter.computed_tokens or run.meter.restored_tokens:
            self.replies.note(reading(self._generator.summary(run)))

    def save(self, path: Path) -> None:
        """Save the conversation. Raises TriforceError."""
        save_conversation(path, self.conversation, self.opened.settings.engine.model)
        self.saved = self.conversation

    def _encode(self, conversation: Conversation, question: str) -> list[int]:
        progress = tokenizing(self._renderer)
        messages, tokenizer = conversation.messages(question), self.opened.model.tokenizer
        return tokenizer.chat_turns(messages, progress, self._known, self.opened.think)

    def _name(self, question: str) -> str:
        documents = self.conversation.documents
        return documents[0].name if documents else question[:LABEL]

    def _request_of_answer(self) -> ModelRequest:
        """Return the request of the next answer: a retry has another seed."""
        settings = self.opened.settings
        generation = replace(settings.generation, seed=(settings.generation.seed + self._retries) % 2**63)
        settings = replace(settings, generation=generation)
        request = replace(self.opened.request, settings=settings, system=self.conversation.system)
        return replace(self.opened, request=request)

    def _keep(self, question: str, run: TextRun) -> None:
        """Add an answer to the conversation, unless it was interrupted before it began."""
        meter = run.meter
        self.summary = self._generator.summary(run)
        if not meter.text and not run.has_ended:
            return
        ids = ids_of_text(meter.ids, meter.text, self.opened.model.tokenizer.decode)
        answer = Answer(meter.text, ids, self.summary.finish_reason, self.summary.seed)
        self.conversation, self.unanswered = self.conversation.answered(question, answer), None
        self._used = self.conversation, len(run.prompt.ids) + len(meter.ids)
        if self._path is not None:
            try:
                self.save(self._path)
            except (KeyboardInterrupt, SystemExit):  # the whole answer was shown
                self.save(self._path)
                raise
