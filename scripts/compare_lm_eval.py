"""Compare scores with lm-eval's on its own items: RULER's needles that need no data from a hub.

    python scripts/compare_lm_eval.py [MODEL] [ITEMS]

lm-eval (`pip install "lm_eval[ruler]"`) makes the items and scores the answers, which the model's exact mode gives;
then `triforce evaluate`'s scores read the same answers.
"""

from __future__ import annotations

import sys

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from offload import LLM, GenerationConfig, Sampling, Tokens
from offload.evaluation.tasks.task import share_found
from offload.settings.config import DEFAULT_MODEL

TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3")
LENGTH = 4096
NEW_TOKENS = 48  # an identifier of 36 characters


class Model(LM):
    """A model of this program, as lm-eval asks it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.llm = LLM(name)

    def generate_until(self, requests: list[Instance], **_: object) -> list[str]:
        return [self._answer(str(request.args[0])) for request in requests]

    def _answer(self, prompt: str) -> str:
        ids = self.llm.tokenizer.encode(prompt)
        config = GenerationConfig(max_new_tokens=NEW_TOKENS, seed=0)
        events = self.llm.engine.generate(ids, Sampling(temperature=0), config)
        found = [token for event in events if isinstance(event, Tokens) for token in event.ids]
        return self.llm.tokenizer.decode(found)

    def loglikelihood(self, requests: list[Instance], **_: object) -> list[tuple[float, bool]]:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Instance], **_: object) -> list[float]:
        raise NotImplementedError


def main(name: str, items: int) -> None:
    """Print lm-eval's score and this program's of each task, on the same answers."""
    model = Model(name)
    metadata = {"tokenizer": str(model.llm.opened.checkpoint.path), "max_seq_lengths": [LENGTH]}
    manager = TaskManager(metadata=metadata)
    found = simple_evaluate(
        model, tasks=list(TASKS), task_manager=manager, limit=items, bootstrap_iters=0, metadata=metadata
    )
    for task in TASKS:
        samples = found["samples"][task]
        ours = [share_found(each["filtered_resps"][0], each["doc"]["outputs"]) for each in samples]
        theirs = [each[str(LENGTH)] for each in samples]
        total = found["results"][task][f"{LENGTH},none"]
        equal = sum(one == other for one, other in zip(ours, theirs, strict=True))
        mean = sum(ours) / len(ours)
        print(f"{task}: lm-eval {total:.3f}, here {mean:.3f}; {equal} of {len(ours)} items with the same score")


if __name__ == "__main__":
    main(*sys.argv[1:2] or [DEFAULT_MODEL], int(sys.argv[2]) if len(sys.argv) > 2 else 10)
