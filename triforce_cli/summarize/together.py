"""Answers whose texts are generated together, and written in order."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count

from offload.errors import TriforceError

from ..output.batch_display import BatchDisplay
from ..output.renderers import Renderer
from ..output.turns import Turn, Turns
from ..run.batch_generator import BatchGenerator, BatchPrompt
from ..run.run import Run
from .passages import Answer, FinishedParts, Passage, following


@dataclass(slots=True)
class _Started:
    """An answer under way: its place and its output's turn, with the turns and texts of its present passages.

    A text is None while it is generated.
    """

    number: int
    answer: Answer
    turn: Turn
    parts: Turns = field(default_factory=Turns)
    texts: list[str | None] = field(default_factory=list)
    error: TriforceError | None = None


class AnswersTogether:
    """Generates the texts of several answers in a batch. What comes early waits in memory, for the order of output.

    A text is taken as soon as there is room for it: of the first answer that has one ready.
    """

    def __init__(
        self, answers: Iterable[Answer], finished: FinishedParts, renderer: Renderer, display: BatchDisplay
    ) -> None:
        self._waiting, self._turns = iter(answers), Turns()
        self._finished, self._renderer, self._display = finished, renderer, display
        self._started: list[_Started] = []
        self._ready: list[tuple[int, int, BatchPrompt]] = []  # a heap, by the numbers of answer and passage

    def generate(self, run: Run, parallel: int) -> BatchGenerator:
        """Generate all, up to `parallel` texts at a time; return the batch that did.

        An error ends its answer alone; the first one is raised after the others have been written.
        """
        batch = BatchGenerator(run, parallel, self._display.end)
        first = self._next()
        if first is not None:
            run.prepare(first.prompt, self._renderer)
        try:
            batch.run(chain([first], (self._next() for _ in count())))  # the batch ends, not its source
        except KeyboardInterrupt:
            for started in self._started:
                started.parts.flush()
            self._turns.flush()
            raise
        errors = [started for started in self._started if started.error is not None]
        for started in errors[1:]:
            self._renderer.warn(str(_named(started)))
        if errors:
            raise _named(errors[0])
        return batch

    def _next(self) -> BatchPrompt | None:
        """Return the next text to generate; None if none is ready."""
        while not self._ready:
            answer = next(self._waiting, None)
            if answer is None:
                return None
            self._start(answer)
        return heapq.heappop(self._ready)[-1]

    def _start(self, answer: Answer) -> None:
        turn = self._turns.add(partial(self._renderer.section, answer.section))
        self._started.append(started := _Started(len(self._started), answer, turn))
        self._advance(started, None)

    def _advance(self, started: _Started, texts: list[str] | None) -> None:
        """Go on with an answer after the texts of its last passages."""
        try:
            passages = following(started.answer.steps, texts)
        except TriforceError as error:
            self._fail(started, error)
            return
        if passages is None:
            started.turn.end()
            return
        self._display.expect(len(passages))
        started.texts = [None] * len(passages)
        started.parts = Turns(started.turn)
        for number, passage in enumerate(passages):
            self._add(started, number, passage, started.parts.add())
        self._advance_if_complete(started)

    def _add(self, started: _Started, number: int, passage: Passage, turn: Turn) -> None:
        """Take the text of a passage from an earlier run, or put it among those that are ready to be generated."""
        if passage.part is None:
            renderer, label = self._renderer.for_sequence(turn), started.answer.section.label
        else:
            renderer, label = self._renderer.for_part(passage.part, turn), passage.part.label
            text = self._finished.find(passage.prompt.ids)
            if text is not None:
                self._renderer.for_sequence(turn).taken_over(passage.part, text)
                self._display.skip()
                turn.end()
                started.texts[number] = text
                return
        done = partial(self._done, started, number, passage, turn)
        sequence = BatchPrompt(passage.prompt, renderer, label, done, partial(self._fail, started))
        heapq.heappush(self._ready, (started.number, number, sequence))

    def _done(self, started: _Started, number: int, passage: Passage, turn: Turn, text: str) -> None:
        if passage.part is not None:
            self._finished.save(passage.prompt.ids, text)
        started.texts[number] = text
        turn.end()
        if started.error is None:
            self._advance_if_complete(started)

    def _advance_if_complete(self, started: _Started) -> None:
        texts = [text for text in started.texts if text is not None]
        if len(texts) == len(started.texts):
            self._advance(started, texts)

    def _fail(self, started: _Started, error: TriforceError) -> None:
        """End an answer: nothing more of it is generated or written, but running parts are still saved."""
        started.error = started.error or error
        self._ready = [each for each in self._ready if each[0] != started.number]
        heapq.heapify(self._ready)
        started.turn.end()


def _named(started: _Started) -> TriforceError:
    """Return the error of an answer, with its name."""
    error = started.error
    named = type(error)(f"{started.answer.section.label}: {error.message}", error.hint)
    named.__cause__ = error.__cause__
    return named
