"""Tasks on long texts that are made here, each a row of TASKS, and scored without another model.

Most are after RULER (arXiv 2404.06654). Imports no torch.
"""

from .needles import MULTIKEY, MULTIQUERY, MULTIVALUE, SINGLE
from .questions import QUESTIONS
from .quotation import QUOTATION
from .tracking import TRACKING
from .turns import TURNS
from .word_counts import COMMON_WORDS, FREQUENT_WORDS

TASKS = {
    task.name: task
    for task in (
        SINGLE,
        MULTIKEY,
        MULTIVALUE,
        MULTIQUERY,
        TRACKING,
        COMMON_WORDS,
        FREQUENT_WORDS,
        QUESTIONS,
        TURNS,
        QUOTATION,
    )
}
