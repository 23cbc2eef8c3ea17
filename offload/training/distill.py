"""Training a head from texts on: the shards of the target's rows, the optimisation, and the files that are left.

What is there already is not done again: a run that was stopped, however that happened, goes on at the last whole shard
or checkpoint, and ends with the same head.
"""

import json
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..api.opened_model import OpenModel
from ..engine import Engine
from ..errors import SettingsError, UnsupportedModel
from ..loading.checkpoint_json import read_json
from ..settings.distillation import Distillation
from ..system.files import replace_file
from ..units import size_text
from .checkpoint import save_head
from .head import Head, HeadShape
from .rows import Shards, save_rows, shard_bytes
from .texts import Texts
from .train import Acceptance, Schedule, Teacher, Trainer, acceptance

WORK = "training"  # the folder, within the head's, of what a run needs until it is done
_SHARD = 32  # blocks
_HELD_OUT = 20  # shards to train on for each shard that is held out
_CALIBRATED = 8  # blocks from which the scale of the taps is taken
_SETTLED = 4  # tokens at the start of a block whose rows are often far larger than all others


@dataclass(frozen=True)
class Progressed:
    """`done` of `total` units of a stage are done."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class Evaluated:
    """The head's acceptance on held-out texts after a step, and the seconds that the rest may take; 0 at the end.

    `loss` is that of the step; None if it was done by an earlier run.
    """

    step: int
    steps: int
    loss: float | None
    acceptance: Acceptance
    seconds_left: float


Events = Generator[Progressed | Evaluated, None, None]


def _shards(kind: str, blocks: int) -> dict[str, int]:
    """Return the names of shards of so many blocks in all, with the blocks of each: the last one may have fewer."""
    whole, rest = divmod(blocks, _SHARD)
    found = {f"{kind}-{number:04d}": _SHARD for number in range(whole)}
    return found | ({f"{kind}-{whole:04d}-{rest}": rest} if rest else {})


class Distiller:
    """Trains a head for an opened model into a folder."""

    def __init__(self, opened: OpenModel, texts: Texts, held_out: Texts, settings: Distillation, folder: Path) -> None:
        """Check what can be checked before the model is loaded.

        Raises SettingsError if the folder has another training, UnsupportedModel for a target whose layers have no
        head's shape, OSError.
        """
        if opened.checkpoint.shape.linear is not None or opened.group.size > 1:
            raise UnsupportedModel(
                "heads are trained for models of attention alone, on one device", "use another model"
            )
        self._opened, self._texts, self._held_out = opened, texts, held_out
        self.settings, self.folder, self._work = settings, folder, folder / WORK
        self._work.mkdir(parents=True, exist_ok=True)
        self._keep_settings()
        vocab = min(settings.vocab, opened.checkpoint.shape.vocab)
        self.shape = HeadShape.for_target(opened.checkpoint.shape, vocab, settings.window)

    def _keep_settings(self) -> None:
        """Write what the files of this training depend on; raise SettingsError if they are of another one."""
        kept = asdict(self.settings) | {"model": self._opened.config.model, "dtype": str(self._opened.dtype)}
        kept |= {"texts": self._texts.digest, "held_out": self._held_out.digest}
        for name in ("tokens", "steps", "batch", "rate"):  # may change when it goes on
            del kept[name]
        path = self._work / "settings.json"
        if not path.exists():
            replace_file(path, json.dumps(kept, indent=2).encode())
            return
        there = json.loads(path.read_text("utf-8"))
        if changed := [name for name in kept if there.get(name) != kept[name]]:
            raise SettingsError(
                f"{self.folder} has a training with another {', '.join(changed)}",
                "use the same options to go on with it, or another --output",
            )

    def run(self, save_every: float, evaluate_every: float) -> Events:
        """Load the model, and do what is left; times in seconds. Raises OutOfMemory, SettingsError, OSError."""
        engine = self._opened.load()
        engine.model.tap(self.shape.taps)
        blocks = -(-self.settings.tokens // self.settings.length)
        names = _shards("train", blocks)
        held = _shards("held-out", min(_SHARD * -(-len(names) // _HELD_OUT), blocks))
        self._check_disk(engine, held | names)
        yield from self._prepare(engine, held, names)
        train, test = (Shards([self._shard(name) for name in each], self.shape.hidden) for each in (names, held))
        draft_ids = self._draft_ids(train)
        teacher = Teacher(engine.model, draft_ids.to(engine.model.device))
        head = self._new_head(teacher, train)
        yield from self._train(head, teacher, train, test, save_every, evaluate_every)
        target = self._opened.checkpoint
        config = read_json(target.path / "config.json") if target.path.is_dir() else {}
        save_head(
            self.folder, head, draft_ids, target.shape, (self._opened.config.model, config.get("architectures", ()))
        )

    def _shard(self, name: str) -> Path:
        return self._work / f"{name}.safetensors"

    def _check_disk(self, engine: Engine, shards: Mapping[str, int]) -> None:
        missing = sum(blocks for name, blocks in shards.items() if not self._shard(name).exists())
        needed = shard_bytes(engine.model, len(self.shape.taps), missing * self.settings.length)
        free = shutil.disk_usage(self._work).free
        if needed > free:
            raise SettingsError(
                f"the target's rows take {size_text(needed)}, and {self.folder} has {size_text(free)} of disk space",
                "use fewer --tokens, or another --output",
            )

    def _prepare(self, engine: Engine, held: Mapping[str, int], names: Mapping[str, int]) -> Iterator[Progressed]:
        """Make the shards that are not there yet, of so many blocks each."""
        total, length = len(held) + len(names), self.settings.length
        for done, (name, blocks) in enumerate([*held.items(), *names.items()]):
            yield Progressed("texts and what the target makes of them", done, total)
            if self._shard(name).exists():
                continue
            texts = self._held_out if name in held else self._texts
            made = texts.make(engine, blocks, f"{self.settings.seed} {name}")
            save_rows(engine.model, self.shape.taps, made, length, self._shard(name))
        yield Progressed("texts and what the target makes of them", total, total)

    def _draft_ids(self, train: Shards) -> Tensor:
        """Return the ids of the most frequent tokens, in order, as at the beginning of the training."""
        path = self._work / "draft-ids.json"
        if not path.exists():
            counts = torch.zeros(self._opened.checkpoint.shape.vocab, dtype=torch.long)
            for ids in (*train.ids(), *(torch.tensor(text) for text in self._texts.given)):
                counts += ids.flatten().long().bincount(minlength=len(counts))
            most = counts.sort(descending=True, stable=True).indices[: self.shape.vocab]
            replace_file(path, json.dumps(most.sort().values.tolist()).encode())
        return torch.tensor(json.loads(path.read_text("utf-8")))

    def _new_head(self, teacher: Teacher, train: Shards) -> Head:
        device = self._opened.device
        blocks = train.read(range(min(_CALIBRATED, len(train))), torch.device("cpu"))
        size = blocks.taps[:, _SETTLED:].flatten(0, 1).square().mean(0).sqrt()
        head = Head(self.shape)
        generator = torch.Generator().manual_seed(self.settings.seed)
        head.initialise(generator, 1 / size.clamp(min=1e-6), teacher.norm, teacher.rows)
        return head.to(device)

    def _train(
        self, head: Head, teacher: Teacher, train: Shards, test: Shards, save_every: float, evaluate_every: float
    ) -> Events:
        own = self.settings
        schedule = Schedule(own.steps, own.batch, own.depth, own.rate, own.seed)
        trainer = Trainer(head, teacher, train, schedule, self._work / "state.safetensors")
        clock: Callable[[], float] = time.monotonic
        loss: float | None = None
        began, evaluated, first = clock(), clock(), schedule.cost(trainer.step)
        total = schedule.cost(schedule.steps)
        for trained in trainer.run(save_every):
            loss, done = trained.loss, schedule.cost(trained.step)
            yield Progressed("training", done, total)
            if clock() - evaluated >= evaluate_every and trained.step < schedule.steps:
                left = (clock() - began) / (done - first) * (total - done)
                yield Evaluated(trained.step, schedule.steps, loss, self._test(head, teacher, test), left)
                evaluated = clock()
        yield Evaluated(trainer.step, schedule.steps, loss, self._test(head, teacher, test), 0.0)

    def _test(self, head: Head, teacher: Teacher, test: Shards) -> Acceptance:
        return acceptance(head, teacher, test, self.settings.depth)
