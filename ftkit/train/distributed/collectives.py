"""How FSDP2 gathers weights and sums gradients: by NCCL, or by copy engines where they can."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ftkit.errors import TrainingError, in_short
from ftkit.train.distributed.copy_engine import AllGather, PeerMemory, ReduceScatter, SymmetricMemory
from ftkit.train.distributed.peer_access import reaches
from ftkit.train.distributed.precision import DTYPES
from ftkit.train.library_versions import COPY_ENGINE_COLLECTIVES

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from ftkit.config.training import TrainingPlan
    from ftkit.train.distributed.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CopyEngineCollectives:
    """What FSDP2 is given in place of its own."""

    all_gather: AllGather
    reduce_scatter: ReduceScatter

    def serve(self, module: FSDPModule) -> None:
        """Take over a module's collectives. Its gradients have to be reduced in the precision of its computations."""
        module.set_custom_all_gather(self.all_gather)  # type: ignore[arg-type] # torch's own classes are private
        module.set_custom_reduce_scatter(self.reduce_scatter)  # type: ignore[arg-type]


def choose_collectives(training: TrainingPlan, world: World) -> CopyEngineCollectives | None:
    """Return copy engines' collectives if the recipe leaves it open or asks for them, and they work here.

    Raises:
        TrainingError: the recipe asks for them, and they don't.
    """
    is_asked = training.collectives == "copy_engine"
    if world.size == 1 or training.collectives == "nccl" or (world.device.type == "cpu" and not is_asked):
        return None
    made, reason = None, _hindrance(training, world)
    if not reason:
        made, reason = _tried(training, world)
    if reason and is_asked:
        raise TrainingError(
            f"collectives by copy engines are not possible: {reason}", fix="set training.collectives=auto"
        )
    log.info("collectives: %s", f"NCCL ({reason})" if reason else f"copy engines ({world.size} GPUs of one host)")
    return made


def _hindrance(training: TrainingPlan, world: World) -> str:
    """Return why copy engines can't be asked; nothing if they can."""
    if world.device.type != "cuda":
        return "there are no GPUs"
    if world.num_hosts > 1:
        return f"the processes are on {world.num_hosts} hosts"
    if training.offload == "all":
        return "weights wait in main memory"
    if not COPY_ENGINE_COLLECTIVES:
        return f"torch {torch.__version__} is older than 2.11"
    others = set(range(world.size)) - {world.local_rank}
    cut_off = [other for other in others if not reaches(world.local_rank, other)]
    return "no NVLink between the GPUs" if world.sum([len(cut_off)])[0] else ""


def _tried(training: TrainingPlan, world: World) -> tuple[CopyEngineCollectives | None, str]:
    """Make the collectives and let them gather and average numbers that are known."""
    precision = DTYPES[training.reduce_precision]
    group, problem, made = world.mesh.get_group(), "", None
    try:
        gathered, reduced = SymmetricMemory(group, world.device), SymmetricMemory(group, world.device)
        made = make_collectives(gathered, reduced, precision)
        problem = wrong_answer(made, world)
    except RuntimeError as error:
        problem = in_short(error)
    problems = [problem for problem in world.gather_objects(problem) if problem]
    return (None, problems[0]) if problems else (made, "")


def wrong_answer(collectives: CopyEngineCollectives, world: World) -> str:
    """Gather and average numbers that are known; return what is wrong, or nothing."""
    numel, group, precision = 1024, world.mesh.get_group(), torch.bfloat16
    ranks = torch.arange(1, world.size + 1, dtype=precision, device=world.device).repeat_interleave(numel)
    gathered = ranks.where(ranks == world.rank + 1, 0)
    collectives.all_gather(gathered, gathered.view(world.size, numel)[world.rank], group)
    reduce = collectives.reduce_scatter
    gradients = reduce.allocate(ranks.shape, dtype=precision, device=world.device).copy_(ranks * (world.rank + 1))
    averaged = reduce.allocate((numel,), dtype=precision, device=world.device)
    reduce(averaged, gradients, group, dist.ReduceOp.AVG)
    expected = torch.full_like(averaged, (world.rank + 1) * (world.size + 1) / 2)
    is_right = torch.equal(gathered, ranks) and torch.equal(averaged, expected)  # host sync: once, before the weights
    return "" if is_right else "copies of known numbers came out wrong"


def make_collectives(gathered: PeerMemory, reduced: PeerMemory, averaged_in: torch.dtype) -> CopyEngineCollectives:
    """Make both collectives; they run at the same time, so each has memory of its own."""
    return CopyEngineCollectives(AllGather(gathered), ReduceScatter(reduced, averaged_in))
