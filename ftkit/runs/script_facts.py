"""Facts about the first steps of a script; `ftkit.train.step_watch` records them for `ftkit.runs.script_checks`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ParamFacts:
    """A parameter of the trained model. A flag is set if it was true in any observed step."""

    name: str
    num_dims: int
    is_trained: bool  # whether it requires gradients
    is_comparable: bool  # whether all ranks should hold equal values: not sharded
    digest: str = ""  # of a sample of its values, at the end
    has_changed: bool = False
    is_called: bool = False  # whether the forward pass called its module
    in_optimizer: bool = False  # in an optimizer that stepped
    has_received: bool = False  # a gradient
    is_nonzero: bool = False  # its gradient
    is_nonfinite: bool = False  # its gradient
    began_zero: bool = False  # all its elements, before step 1
    was_zero: bool = False  # all its elements, before the last step
    rounded: float | None = None  # fraction of elements with a gradient that the last step did not change


@dataclass
class CallFacts:
    """A call of the trained model from the script."""

    step: int  # optimizer steps before it
    has_grad: bool
    is_training: bool  # whether a dropout module is active
    rows: list[str] = field(default_factory=list)  # digests of its input rows
    backward: int = 0  # number of the backward pass through it, from 1; 0 without one
    counts: dict[str, int] | None = None  # from `ftkit.train.step_readings.count_targets`
    weight: float | None = None  # of a target's cross entropy in the loss; None for another loss


@dataclass
class ReplayFacts:
    """Largest differences between outputs for the first batch, with and without a change; None: not applicable."""

    bound: float  # of rounding
    effect: float | None = None  # at the changed tokens
    later_documents: float | None = None
    earlier_tokens: float | None = None
    padding: float | None = None  # at the tokens of rows whose padding changed
    evaluation: float | None = None  # between two calls in evaluation mode with different random numbers


@dataclass
class RankFacts:
    rank: int
    world_size: int
    num_steps: int = 0
    params: list[ParamFacts] = field(default_factory=list)
    calls: list[CallFacts] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # largest learning rate of each step
    schedulers: list[tuple[int, bool]] = field(default_factory=list)  # steps; whether its optimizer stepped
    statistics: list[str] = field(default_factory=list)  # frozen normalizations whose running statistics changed
    keeps_gradients: bool = False  # they are nonzero before the first backward pass of a step
    loses_gradients: bool = False  # they are zero before a later one
    moves_weights: bool = False  # between the backward passes of a step of the first optimizer, as with L-BFGS or a GAN
    num_dropouts: int = 0
    is_untied: bool = False
    num_others: int = 0  # parameters in the optimizer that do not belong to the model
    splits_samples: bool = False  # tensor or context parallelism: several ranks work on one sample
    corrects_rounding: bool = False
    replay: ReplayFacts | None = None
    replay_error: str = "the model was not called again"
    seconds: float = 0.0
    error: str = ""

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer holds master copies: tensors other than the model's, although the model changes."""
        trained = [param for param in self.params if param.is_trained]
        return not any(p.in_optimizer for p in trained) and any(p.has_changed for p in trained)
