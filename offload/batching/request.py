"""What one sequence of a batch is to do."""

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field

from ..events import Event
from ..loading.prompt_checks import check_prompt, token_ids
from ..loading.quantization_checks import check_kv
from ..model.decoder import Model
from ..model.heads import Head
from ..settings.config import GenerationConfig, Sampling, Speculation
from ..settings.method_sizes import check_approximate, check_forgetting, check_trees, forgets, has_draft_model
from ..settings.validation import require, require_instance
from ..short_repr import short_repr

Events = Generator[Event, int | None]


def never() -> bool:
    """Return False: a sequence that is not cancelled."""
    return False


@dataclass(frozen=True)
class BatchRequest:
    """A prompt of token `ids` to be answered in a batch, as by `Engine.generate`.

    `key` names its events. `text` turns the engine's events into those that are wanted, as `text_stream.stream_text`.
    `is_cancelled` is called before each pass, in the batch's thread; once it returns True, the sequence ends.
    Sequences share what is cached of a common beginning, in memory and on disk.
    `logprobs` as of `Engine.generate`.
    """

    key: Hashable
    ids: Sequence[int]
    sampling: Sampling
    config: GenerationConfig
    speculation: Speculation = field(default_factory=Speculation)
    text: Callable[[Events], Events] = field(default=lambda events: events)
    is_cancelled: Callable[[], bool] = never
    logprobs: int | None = None

    def checked_ids(self, model: Model, draft: Model | Head | None) -> list[int]:
        """Return the token ids. Raises PromptError for them, and SettingsError for what the models cannot run."""
        settings, config, shape = self.speculation, self.config, model.shape
        require_instance("config", config, GenerationConfig)
        require_instance("speculation", settings, Speculation)
        ids = token_ids(self.ids)
        if forgets(settings):
            check_forgetting(settings, shape.context)
        hint = "open the model with this speculation, or use the draft lookup"
        require(draft is not None or not has_draft_model(settings), "the draft model was not loaded", hint)
        check_approximate(settings, shape.family, not shape.is_uniform)
        check_kv(model.kv, shape, missing=None)
        check_trees(settings, any(loaded.shape.linear for loaded in (model, draft) if loaded), shape.vocab)
        check_prompt(shape, ids, 0 if forgets(settings) else len(ids) + config.max_new_tokens)
        require_instance("sampling", self.sampling, Sampling)
        hint = "use 0 for the tokens' own alone, or leave it out"
        require(self.logprobs is None or self.logprobs >= 0, f"logprobs is {short_repr(self.logprobs)}", hint)
        return ids
