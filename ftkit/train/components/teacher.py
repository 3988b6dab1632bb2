"""A teacher's distributions for distillation: computed once, before step 1, and stored next to the prepared data.

A shard file has the distributions of consecutive packs, computed by one process. It is renamed once complete. A killed
computation therefore continues with the missing shards, on any number of processes, and other runs reuse all of them
without the teacher. They check the folder's key, the sizes of shards, and the checksum of each pack that they read.
"""

from __future__ import annotations

import gc
import os
import zlib
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ftkit.config.objectives import ENTRY_BYTES
from ftkit.data.packing import IGNORED
from ftkit.data.prepared_data import PackStore
from ftkit.errors import DataError
from ftkit.files import publish
from ftkit.train.causal_lm import CausalLM
from ftkit.train.components.batches import to_micro_batch
from ftkit.train.components.references import not_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ftkit.data.prepared_data import PreparedData
    from ftkit.planning.plan import RunPlan
    from ftkit.train.engine import Engine
    from ftkit.train.world import World

_TOKENS_PER_SHARD = 2**17  # tokens of a shard's packs: a killed computation loses at most these on each process


@dataclass(frozen=True)
class TeacherSplit:
    """The teacher's distributions for the packs of a split; each pack is read on demand.

    A shard has, per pack, a CRC-32 of the pack's entries, and per trained token, the top k tokens and the tail: each is
    the log-probability in fp32 without the last 8 bits, and the token in 24 bits.
    """

    store: PackStore
    folder: Path
    name: str
    vocabulary: int  # number of the tokens that teacher and student have
    top_k: int

    def shard_of(self, pack: int) -> range:
        size = max(1, _TOKENS_PER_SHARD // self.store.sequence_length)
        return range(pack - pack % size, min(pack - pack % size + size, len(self.store)))

    @property
    def shards(self) -> list[range]:
        return [*dict.fromkeys(map(self.shard_of, range(len(self.store))))]

    def path(self, shard: range) -> Path:
        return self.folder / f"{self.name}-{shard.start:07d}.topk"

    def num_bytes(self, packs: Sequence[int]) -> int:
        return int(self.store.num_targets[list(packs)].sum()) * (self.top_k + 1) * ENTRY_BYTES + 4 * len(packs)

    def missing(self) -> list[range]:
        """Return the shards that are missing, or have the wrong size."""
        found = {Path(entry.path): entry.stat().st_size for entry in os.scandir(self.folder)}
        return [shard for shard in self.shards if found.get(self.path(shard)) != self.num_bytes(shard)]

    def read(self, packs: Sequence[int]) -> NDArray[np.int32]:
        """Return the distributions of the packs' labels, as `fused_loss.Teacher.stored`: int32 [2, N, k + 1]."""
        raw = np.concatenate([np.empty(0, np.uint8), *map(self._read, packs)])
        entries = raw.reshape(-1, self.top_k + 1, ENTRY_BYTES)
        wide = np.zeros((2, *entries.shape[:2], 4), np.uint8)
        wide[0, ..., 1:], wide[1, ..., :3] = entries[..., :3], entries[..., 3:]
        return wide.view("<i4")[..., 0]

    def _read(self, pack: int) -> NDArray[np.uint8]:
        shard, found = self.shard_of(pack), np.empty(0, np.uint8)
        if (path := self.path(shard)).is_file():
            offset = self.num_bytes(range(shard.start, pack))
            found = np.fromfile(path, np.uint8, self.num_bytes([pack]), offset=offset)
        if found[:4].tobytes() != zlib.crc32(found[4:].data).to_bytes(4, "little"):
            raise DataError(
                f"the teacher's distributions of pack {pack} are damaged or missing in {path}",
                fix=f"delete {path}, and continue the run: it computes what is missing",
            )
        return found[4:]

    def compute(
        self, engine: Engine, plan: RunPlan, world: World, shard: range, num_packs: int, *, writes: bool
    ) -> None:
        """Compute a shard with the teacher. Every process runs the micro-batches of `num_packs`, the largest shard."""
        micro, path = plan.recipe.training.micro_batch_size, self.path(shard)
        temporary = path.with_name(f".{path.name}.{plan.id}")  # the runs of a sweep may compute it at the same time
        with engine.inference() as model, temporary.open("wb") if writes else nullcontext() as file:
            for first in range(0, num_packs, micro):  # each forward is a collective
                chosen = shard[first : first + micro] or shard[-1:]
                batch = to_micro_batch(read := self.store.read(chosen), world.device)
                found = model(compute=CausalLM.top_log_probs, batch=batch, vocabulary=self.vocabulary, top_k=self.top_k)
                stored = found.cpu().numpy()  # host sync: before step 1
                self._check(stored, read, chosen, plan.id)
                bits, tokens = (each.astype("<i4")[..., None].view(np.uint8) for each in (stored[0] + 0x80, stored[1]))
                entries = np.concatenate([bits[..., 1:], tokens[..., :3]], axis=-1)
                if file is not None and first < len(shard):
                    for part in np.split(entries, np.cumsum(self.store.num_targets[list(chosen)])[:-1]):
                        file.write(zlib.crc32(part.tobytes()).to_bytes(4, "little") + part.tobytes())
        if writes:
            publish(temporary, path)

    def _check(self, stored: NDArray[np.int32], read: NDArray[np.int32], packs: range, run: str) -> None:
        if len(wrong := np.flatnonzero(np.isnan(stored[0].view(np.float32)).any(axis=1))):
            number, token = divmod(int(np.flatnonzero(read[:, 1].reshape(-1) != IGNORED)[wrong[0]]), read.shape[2])
            pack, document = packs[number], int((read[number, 2, : token + 1] == 0).sum())
            raise not_finite("the teacher", document, pack, self.name, run)


def compute_distributions(
    plan: RunPlan, data: PreparedData, world: World, build: Callable[[], Engine], report: Callable[[str], None]
) -> list[TeacherSplit]:
    """Return the stored distributions of both splits; compute missing ones with the teacher, which `build` loads.

    Collective. Frees the teacher's memory. `report` gets the progress. Raises TrainingError if it computes NaN.
    """
    recipe, teacher, options = plan.recipe, plan.recipe.teacher, plan.recipe.training.distillation
    if teacher is None or options is None:
        return []
    vocabulary = min(teacher.architecture.vocab_size, recipe.model.architecture.vocab_size)
    stores, todo = {"train": data.read_train(), "validation": data.read_validation()}, list[tuple[int, range]]()
    splits = [TeacherSplit(store, data.root, name, vocabulary, options.top_k) for name, store in stores.items()]
    needed = (split.path(shard).name for split in splits for shard in split.shards)
    facts = [teacher.revision, recipe.training.compute_precision, vocabulary, options.top_k]
    folder = data.folder_of("teachers", teacher.weights, facts, needed, plan.layout.root)
    splits = [replace(split, folder=folder) for split in splits]
    if world.is_first:  # only rank 0 lists files: a file system may show others an older state
        folder.mkdir(parents=True, exist_ok=True)
        todo = [(number, shard) for number, split in enumerate(splits) for shard in split.missing()]
    todo = world.gather_objects(todo)[0]
    if not todo:
        return splits
    engine, num_packs, left = build(), sum(map(len, stores.values())), sum(len(shard) for _, shard in todo)
    for first in range(0, len(todo), world.size):
        report(f"{num_packs - left} of {num_packs} packs")
        group = todo[first : first + world.size]
        number, shard = group[min(world.rank, len(group) - 1)]
        most = max(len(each) for _, each in group)
        splits[number].compute(engine, plan, world, shard, most, writes=world.rank < len(group))
        left -= sum(len(each) for _, each in group)
    del engine
    gc.collect()  # modules and hooks refer to each other
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    world.barrier()
    return splits
