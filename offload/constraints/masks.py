"""The masks of one sequence: of every row of a draft, by the row's own history."""

import time
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import TriforceError
from ..events import MaskStatistics
from .matcher import Allowed, Matcher

Path = tuple[int, ...]  # tokens after the history
_NEVER = float("-inf")


class TokenMasks:
    """Masks logits by a constraint, of which one matcher follows the history and, back and forth, each row's path.

    Drafters at all levels and their verifier ask for the same rows, so masks are kept until the history grows.
    """

    def __init__(self, matcher: Matcher, end_ids: Collection[int], vocab: int) -> None:
        """`end_ids` end an answer; the first one is the one that the matcher knows."""
        self._matcher, self._vocab = matcher, vocab
        self._ends = list(end_ids)
        self._in_vocab = [each for each in self._ends if each < vocab]
        self._every: Allowed = np.ones(vocab, dtype=bool)
        self._unended = self._every.copy()
        self._unended[self._in_vocab] = False
        self._path: list[int] = []  # tokens after the history that the matcher has consumed
        self._is_left = False  # the history is not in the language
        self._known: dict[Path, Allowed | TriforceError | None] = {}
        self._seconds, self._computed, self._forced, self._rows = 0.0, 0, 0, 0

    @property
    def statistics(self) -> MaskStatistics:
        return MaskStatistics(self._computed, self._seconds, self._forced, self._rows)

    def observe(self, ids: Sequence[int]) -> None:
        """Append tokens of the answer to the history. Raises TriforceError if they went past a dead end."""
        start, added = time.perf_counter(), tuple(ids)
        for count in range(1, len(added)):
            if isinstance(dead_end := self._known.get(added[:count]), TriforceError):
                raise dead_end
        self._is_left = self._is_left or not self._move(added)
        self._path.clear()
        self._known = {path[len(added) :]: mask for path, mask in self._known.items() if path[: len(added)] == added}
        self._seconds += time.perf_counter() - start

    def apply(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Return logits `[rows, vocab]` with -inf for tokens that may not follow the history and the row's path.

        A row whose path is not allowed itself is unchanged: its tokens cannot be accepted. Where logits rule out all
        allowed tokens, as a drafter's of a smaller vocabulary may, these are equally likely. A row without a finite
        logit is unchanged: it is an error.
        """
        masks = [self.allowed(tuple(path)) for path in paths]
        if all(mask is None for mask in masks):
            return logits
        start = time.perf_counter()
        self._rows += len(masks)
        every = np.stack([self._every if mask is None else mask for mask in masks])
        forbidden = ~torch.from_numpy(every).to(logits.device)
        bound = logits.masked_fill(forbidden, _NEVER)
        best = bound.amax(dim=-1, keepdim=True)
        if logits.device.type != "cpu" or not best.min() > _NEVER:  # a GPU is not waited for
            ruled_out = (best == _NEVER) & logits.amax(dim=-1, keepdim=True).isfinite()
            bound = torch.where(ruled_out, torch.zeros_like(bound).masked_fill(forbidden, _NEVER), bound)
        self._seconds += time.perf_counter() - start
        return bound

    def allowed(self, path: Path) -> Allowed | None:
        """Return which tokens may follow the history and a path, `[vocab]`; None if that is not allowed itself.

        Raises TriforceError if none may follow the history. A draft's path to a dead end is an error once it is
        accepted.
        """
        if self._is_left:
            return None
        if path not in self._known:
            start = time.perf_counter()
            self._known[path] = self._compute(path)
            self._seconds += time.perf_counter() - start
        found = self._known[path]
        if isinstance(found, TriforceError) and not path:
            raise found
        return None if isinstance(found, TriforceError) else found

    def possible(self, tokens: Sequence[int], parents: Sequence[int], before: Path = ()) -> list[int]:
        """Return the nodes of a tree of tokens, after the history and the path `before`, that may be accepted.

        The root is the parent -1.
        """
        if self._is_left:
            return list(range(len(tokens)))
        paths, kept = {-1: before}, list[int]()
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            mask = self.allowed(paths[parent]) if parent in paths else None
            if mask is not None and mask[token]:
                paths[node] = (*paths[parent], token)
                kept.append(node)
        return kept

    def forced(self, limit: int) -> list[int]:
        """Return the tokens, up to `limit`, that must follow the history whatever the model's logits are.

        The last one may be an end of the answer.
        """
        found: list[int] = []
        while len(found) < limit and (not found or found[-1] not in self._ends):
            mask = self.allowed(tuple(found))
            if mask is None or np.count_nonzero(mask) != 1:
                break
            found.append(int(mask.argmax()))
        self._forced += len(found)
        return found

    def _compute(self, path: Path) -> Allowed | TriforceError | None:
        try:
            if not self._move(path):
                return None
            found = self._matcher.allowed()
        except TriforceError as dead_end:
            return dead_end
        if found is None:
            return self._unended
        self._computed += 1
        mask: Allowed = np.zeros(self._vocab, dtype=bool)
        count = min(len(found), self._vocab)
        mask[:count] = found[:count]
        mask[self._in_vocab] = found[self._ends[0]]
        return mask

    def _move(self, path: Sequence[int]) -> bool:
        """Bring the matcher from its path to another one; return whether the constraint allows that.

        An end of the answer is consumed by nobody: what would follow it is never emitted.
        """
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        self._matcher.rollback(len(self._path) - common)
        del self._path[common:]
        for token in path[common:]:
            if token in self._ends or not self._matcher.consume(token):
                return False
            self._path.append(token)
        return True
