"""Tasks on long texts that are made here, each a row of TASKS, and scored without another model.

Most are after RULER (arXiv 2404.06654). Imports no torch.
"""

from .needles import NEEDLES
from .questions import QUESTIONS
from .quotation import QUOTATION
from .tracking import TRACKING
from .turns import TURNS
from .word_counts import WORD_COUNTS

TASKS = {task.name: task for task in (*NEEDLES, TRACKING, *WORD_COUNTS, QUESTIONS, TURNS, QUOTATION)}
