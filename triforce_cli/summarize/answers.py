"""The answers of a summary, each made of passages that follow from earlier ones: generated in order, or together."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count

from offload.errors import TriforceError
from offload.units import counted

from ..output.batch_display import BatchDisplay
from ..output.format import about, duration, time_left
from ..output.renderers import Renderer
from ..output.turns import Part, Section, Turn
from ..run.batch_generator import BatchGenerator, BatchPrompt
from ..run.opened_request import Prompt
from ..run.run import Run
from .finished_parts import FinishedParts


@dataclass(frozen=True, slots=True)
class Passage:
    """A text to generate: the notes on a `part`, or the answer itself."""

    prompt: Prompt
    part: Part | None = None


# Yields passages that do not depend on each other, and is sent their texts; the last one is the answer.
Steps = Generator[Sequence[Passage], list[str] | None, None]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to generate, by its steps."""

    section: Section
    steps: Steps

    def following(self, texts: list[str] | None) -> Sequence[Passage] | None:
        """Return the next passages after the texts of the last ones (None at first); None after all."""
        try:
            return self.steps.send(texts)
        except StopIteration:
            return None


class AnswersInOrder:
    """Generates one text after the other; `parts` are to be read in all, besides further rounds."""

    def __init__(self, run: Run, finished: FinishedParts, renderer: Renderer, parts: int) -> None:
        self._run, self._finished, self._renderer, self._parts = run, finished, renderer, parts
        self._started, self._parts_read = time.monotonic(), 0
        self._read = self._written = 0  # tokens of all texts

    def generate(
        self, answers: Iterable[Answer], begin: Callable[[Section], None], note: Callable[[str], None]
    ) -> None:
        """Generate all answers. `begin` is called before each; `note` prints a line.

        Raises what `Run.generate` and the steps raise.
        """
        for answer in answers:
            begin(answer.section)
            texts = None
            while (passages := answer.following(texts)) is not None:
                texts = [self._text_of(passage, note) for passage in passages]
        if self._parts_read:
            parts, seconds = counted(self._parts_read, "part"), time.monotonic() - self._started
            note(f"in all, with {parts}: {self._read:,} tokens read, {self._written:,} written in {duration(seconds)}")

    def _text_of(self, passage: Passage, note: Callable[[str], None]) -> str:
        part, renderer = passage.part, self._renderer
        if part is None:
            return self._generated(passage.prompt, renderer, "")
        text = self._finished.find(passage.prompt.ids)
        if text is not None:
            renderer.taken_over(part, text)
            return text
        label, left = part.label, self._parts - self._parts_read
        if self._parts_read and part.round == 1 and left:
            seconds = left * (time.monotonic() - self._started) / self._parts_read
            label += f", {time_left(seconds)}"
            if self._parts_read == 1:  # corrects the planned time
                note(f"{counted(left, 'more part')}: {about(seconds)}, as the first one took")
        text = self._generated(passage.prompt, renderer.for_part(part), label)
        self._finished.save(passage.prompt.ids, text)
        self._parts_read += 1
        return text

    def _generated(self, prompt: Prompt, renderer: Renderer, label: str) -> str:
        meter = self._run.generate(prompt, renderer, label)
        self._read += meter.prompt_tokens
        self._written += meter.new_tokens
        return meter.text


@dataclass(slots=True)
class _Started:
    """An answer under way: its output's turn, and of its present passages the turns, the texts and the prompts.

    A text is None while it is generated; `ready` are the prompts whose generation has not begun.
    """

    answer: Answer
    turn: Turn
    texts: list[str | None] = field(default_factory=list)
    ready: deque[BatchPrompt] = field(default_factory=deque)
    error: TriforceError | None = None

    def named_error(self) -> TriforceError | None:
        """Return the answer's error, if any, with the answer's name."""
        if self.error is None:
            return None
        named = type(self.error)(f"{self.answer.section.label}: {self.error.message}", self.error.hint)
        named.__cause__ = self.error.__cause__
        return named


class AnswersTogether:
    """Generates the texts of several answers in a batch. What comes early waits in memory, for the order of output.

    A text is taken as soon as there is room for it: of the first answer that has one ready.
    """

    def __init__(
        self, answers: Iterable[Answer], finished: FinishedParts, renderer: Renderer, display: BatchDisplay
    ) -> None:
        self._waiting, self._turns = iter(answers), deque[Turn]()
        self._finished, self._renderer, self._display = finished, renderer, display
        self._started: list[_Started] = []

    def generate(self, run: Run, parallel: int) -> BatchGenerator:
        """Generate all, up to `parallel` texts at a time; return the batch that did.

        An error ends its answer alone; the first one is raised after the others have been written.
        """
        batch = BatchGenerator(run, parallel, self._display.end)
        first = self._next()
        if first is not None:
            run.prepare(self._renderer)
        try:
            batch.run(chain([first], (self._next() for _ in count())))  # the batch ends, not its source
        except KeyboardInterrupt:
            for turn in self._turns:
                turn.flush()
            raise
        errors = [error for started in self._started if (error := started.named_error()) is not None]
        for error in errors[1:]:
            self._renderer.warn(str(error))
        if errors:
            raise errors[0]
        return batch

    def _next(self) -> BatchPrompt | None:
        """Return the next text to generate; None if none is ready."""
        while True:
            for started in self._started:
                if started.ready:
                    return started.ready.popleft()
            answer = next(self._waiting, None)
            if answer is None:
                return None
            turn = Turn(self._turns, partial(self._renderer.section, answer.section))
            self._started.append(started := _Started(answer, turn))
            self._advance(started, None)

    def _advance(self, started: _Started, texts: list[str] | None) -> None:
        """Go on with an answer after the texts of its last passages."""
        try:
            passages = started.answer.following(texts)
        except TriforceError as error:
            self._fail(started, error)
            return
        if passages is None:
            started.turn.end()
            return
        self._display.expect(len(passages))
        started.texts = [None] * len(passages)
        for number, passage in enumerate(passages):
            self._add(started, number, passage)
        self._advance_if_complete(started)

    def _add(self, started: _Started, number: int, passage: Passage) -> None:
        """Take the text of a passage from an earlier run, or put it among those that are ready to be generated."""
        turn = started.turn
        if passage.part is None:
            renderer, label = self._renderer.for_sequence(turn), started.answer.section.label
        else:
            renderer, label = self._renderer.for_part(passage.part, turn), passage.part.label
            text = self._finished.find(passage.prompt.ids)
            if text is not None:
                self._renderer.for_sequence(turn).taken_over(passage.part, text)
                self._display.skip()
                started.texts[number] = text
                return
        done = partial(self._done, started, number, passage)
        started.ready.append(BatchPrompt(passage.prompt, renderer, label, done, partial(self._fail, started)))

    def _done(self, started: _Started, number: int, passage: Passage, text: str) -> None:
        if passage.part is not None:
            self._finished.save(passage.prompt.ids, text)
        started.texts[number] = text
        if started.error is None:
            self._advance_if_complete(started)

    def _advance_if_complete(self, started: _Started) -> None:
        texts = [text for text in started.texts if text is not None]
        if len(texts) == len(started.texts):
            self._advance(started, texts)

    def _fail(self, started: _Started, error: TriforceError) -> None:
        """End an answer: nothing more of it is generated or written, but running parts are still saved."""
        started.error = started.error or error
        started.ready.clear()
        started.turn.end()
