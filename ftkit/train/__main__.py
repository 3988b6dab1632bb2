"""`python -m ftkit.train PLAN [RESTARTS]`: one rank of a run, started by torchrun.

RESTARTS is the number of restarts of training within the job. `--count JSON` counts a model's parameters for the
planner, which does not import torch.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

from ftkit.data.imports import import_transformers
from ftkit.errors import FtkitError, redact
from ftkit.planning.layout import RunLayout
from ftkit.planning.plan import read_plan
from ftkit.runs.sync import copied_while_trained
from ftkit.train.launcher import RunRank, faster_imports, follow_launcher, launch_time

log = logging.getLogger(__name__)


def main(plan_path: Path, num_restarts: int = 0) -> int:
    """Run this rank; write its error next to its log, for `ftkit status`."""
    layout = RunLayout(plan_path.parent)

    def report(reason: Exception) -> None:
        if isinstance(reason, FtkitError):
            log.error("%s", reason)
        else:
            log.error("rank %d failed", rank.rank, exc_info=reason)

    rank = RunRank(layout, log.info, report)
    begun = {"starting the ranks": launch_time(), "importing libraries": time.time()}
    follow_launcher(rank.at_end.close)
    _start_logs(layout, rank)
    try:
        rank.take_run(num_restarts)  # the other ranks wait for this one
        with rank.at_end:
            plan = read_plan(layout)
            num_nodes = int(os.environ["WORLD_SIZE"]) // plan.placement.processes_per_node
            plan = plan.on_nodes(num_nodes) or plan  # the job script leaves out nodes that no longer answer
            with faster_imports():
                import_transformers()
                from ftkit.train.private_apis.torch import record_collectives  # noqa: PLC0415
                from ftkit.train.trainer import run_training  # noqa: PLC0415 - its imports can fail too
                from ftkit.train.world import init_world  # noqa: PLC0415

                if plan.recipe.training.method != "full":
                    from ftkit.train.private_apis.libraries import import_peft  # noqa: PLC0415

                    import_peft()
            begun["joining the process group"] = time.time()
            record_collectives()
            rank.sample_gpus(plan.placement)
            context_parallel = plan.recipe.training.context_parallel
            num_replicas = plan.engine.num_replicas
            with init_world(plan.placement, context_parallel, num_replicas) as world:  # all ranks wait for rank 0
                rank.clear_error()
                with copied_while_trained(plan) if world.is_first else nullcontext():
                    run_training(plan, world, begun)
    except Exception as error:  # noqa: BLE001 - any error is recorded for `ftkit status`
        return rank.fail(error)
    return 0


class _WithoutSecrets(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record), os.environ)


def _start_logs(layout: RunLayout, rank: RunRank) -> None:
    rank.redirect_output()
    handlers: list[logging.Handler] = [logging.FileHandler(layout.rank_log(rank.rank))]
    if rank.rank == 0:
        handlers.append(logging.StreamHandler())
    for handler in handlers:
        handler.setFormatter(_WithoutSecrets(f"%(asctime)s rank {rank.rank} %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=handlers)
    logging.captureWarnings(True)  # noqa: FBT003
    warnings.simplefilter("once")
    silence_training()


def silence_training() -> None:
    """Suppress two warnings that users can ignore. Call it after all other warning filters are set.

    * With selective checkpointing, torch's compiler always warns of in-place operations. ftkit's layers have none on
      saved tensors.
    * fla warns that flash-attn is missing. Only layers of fla that transformers does not use need it.
    """
    reminder = "Detected that context_fn is passed to torch.utils.checkpoint under torch.compile."
    torch_log = logging.getLogger("torch._higher_order_ops.wrap")
    torch_log.addFilter(lambda record: not record.getMessage().lstrip().startswith(reminder))
    warnings.filterwarnings("ignore", "Flash Attention is not installed", ImportWarning, r"fla\.")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--count", model]:
            import_transformers()
            from ftkit.train.param_count import print_counts  # its imports can fail beside broken packages

            print_counts(model)
            sys.exit()
        case [plan, *num_restarts]:
            code = main(Path(plan), *map(int, num_restarts))
    logging.shutdown()
    sys.stdout.flush()
    # Skip the exit handlers of the interpreter and of libraries: gloo's threads can abort in them, which would turn a
    # success into a failure.
    os._exit(code)
