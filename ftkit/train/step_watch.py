"""Watch the first optimizer steps of a script in its process with global hooks of torch, and remove them afterwards.

The watch replaces nothing in the script or its objects. Before the next step, it calls the model again with the first
batch, then restores buffers, modes and RNG states, so that training is the same as without the watch.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from ftkit.runs.script_facts import CallFacts, ParamFacts, RankFacts, ReplayFacts
from ftkit.train.private_apis.torch import hooks_with_kwargs
from ftkit.train.step_readings import (
    MATRIX,
    Call,
    compare_inputs,
    config_of,
    difference_of,
    digest_of,
    is_logits,
    largest_in,
    read_gradient,
    read_labels,
    sample_of,
    some_rows,
    tensors_in,
    unwrapped,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

_NUM_STEPS: Final = 2  # with a learning rate above 0: adapters that begin at 0 block some gradients in the first
_WRAPPERS: Final = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_DROPOUTS: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_CORRECTIONS: Final = ("kahan", "compensation", "stochastic", "master")  # in names of optimizers' settings and states


@dataclass
class _Param:
    """A parameter, with samples of its values before step 1 and before the current step."""

    facts: ParamFacts
    value: nn.Parameter
    first: Tensor
    last: Tensor
    largest: Tensor | None = None  # absolute gradient of the newest backward pass


class StepWatch:
    """Observe this process until the first forward pass after two steps, then pass the facts to `report`."""

    def __init__(self, rank: int, world_size: int, report: Callable[[RankFacts], None]) -> None:
        self.facts, self._report, self._thread = RankFacts(rank, world_size), report, threading.get_ident()
        self._handles: list[Any] = []
        self._forget()

    def _forget(self) -> None:
        self._stack: list[nn.Module] = []
        self._modules: dict[int, nn.Module] = {}  # modules of the trained models, by id
        self._roots: list[nn.Module] = []
        self._called: set[int] = set()
        self._params: dict[int, _Param] = {}
        self._means: dict[str, tuple[Tensor, Tensor]] = {}
        self._optimizers: list[Optimizer] = []
        self._schedulers: list[tuple[LRScheduler, int]] = []  # with their steps before step 1
        self._num_backwards = self._num_before_backward = 0  # backward passes; calls before the last one
        self._num_updates = self._num_before_step = 0  # steps of all optimizers; steps before the current one
        self._call: Call | None = None
        self._first: Call | None = None  # the first call with a graph
        self._replay: Call | None = None  # the call of the running replay

    def start(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def finish(self, *, can_replay: bool = True) -> None:
        """End the watch, and report. Set `can_replay` only if all ranks replay. A second call has no effect."""
        if not self._handles:
            return
        self._stack.clear()
        with self._guarded():
            try:
                self.facts.replay = self._replay_first(self._first) if self._first and can_replay else None
            except Exception as error:  # noqa: BLE001 - the script must not end with it
                self.facts.replay_error = f"the model can't be called again: {type(error).__name__}: {error}"
            self._collect()
        for handle in self._handles:
            handle.remove()
            hooks_with_kwargs.pop(handle.id, None)
        self._handles = []
        self._forget()
        self._report(self.facts)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Time the watch, and record its errors instead of raising them: they must not end the script."""
        began = time.monotonic()
        try:
            with torch.no_grad():
                yield
        except Exception as error:  # noqa: BLE001 - as above
            self.facts.error = self.facts.error or f"the watch failed: {type(error).__name__}: {error}"
        self.facts.seconds += time.monotonic() - began

    def _is_watching(self) -> bool:
        """Return False while compiling, after an error, and in other threads, such as one that recomputes layers."""
        return not torch.compiler.is_compiling() and threading.get_ident() == self._thread and not self.facts.error

    def _enter(self, module: nn.Module, _: object) -> None:
        if not self._is_watching():
            return
        if not self._stack:
            self._call = self._replay or self._begin(module)
        if self._handles:  # or _begin has ended the watch
            self._stack.append(module)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        """Read a module's output; in a replay, return a changed embedding."""
        if not self._is_watching() or not self._stack:
            return None
        self._stack.pop()
        self._called.add(id(module))
        call = self._call
        if call is None or len(rest) == 1:  # the forward pass raised an error
            return None
        kwargs, output = rest
        with self._guarded():
            if isinstance(module, nn.Embedding) and args[0].ndim == MATRIX and module.num_embeddings > call.vocab:
                call.ids, call.vocab = args[0], module.num_embeddings
                if call.changed is not None:
                    return torch.where(call.changed[..., None], output.roll(1, -1) + output.std(), output)
            elif is_logits(output, call):
                call.logits = output
            elif isinstance(output, Tensor) and call.ids is not None and output.shape[:-1] == call.ids.shape:
                call.hidden = output
            self._choose_model(call, module, args, kwargs, output)
            if not self._stack:
                self._end(call, [each for each in tensors_in(output) if each.is_floating_point()])
        return None

    def _choose_model(
        self, call: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        """Record the model and its arguments: a module around it, such as Lightning's, may take a batch in any form."""
        tokens = kwargs.get("input_ids")
        has_tokens = isinstance(tokens, Tensor) and tokens.ndim == MATRIX
        found = [each for each in tensors_in(output) if has_tokens and each.requires_grad == call.facts.has_grad]
        is_model = not call.kwargs or hasattr(config_of(module), "model_type")  # of transformers
        if (is_model and any(is_logits(each, call) for each in found)) or not (self._stack or call.kwargs):
            call.model, call.args, call.kwargs, call.ids = module, args, kwargs, tokens if has_tokens else call.ids

    def _begin(self, root: nn.Module) -> Call | None:
        is_part = id(root) in self._modules and root not in self._roots  # recomputed, or called on its own
        if is_part or not any(param.requires_grad for param in root.parameters()):
            return None
        rates, has_grad = self.facts.rates, torch.is_grad_enabled()
        if has_grad and (sum(map(bool, rates)) >= _NUM_STEPS or rates[-_NUM_STEPS:] == [0.0] * _NUM_STEPS):
            self.finish()
            return None
        with self._guarded():
            if has_grad and root not in self._roots:  # a reference model is only called under `no_grad`
                self._add_root(root)
        is_dropping = any(each.training for each in root.modules() if _drops(each))
        return Call(root, CallFacts(self.facts.num_steps, has_grad, is_dropping))

    def _add_root(self, root: nn.Module) -> None:
        if not self._roots:  # by type, not isinstance, which would make lazy objects of libraries import their modules
            found = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
            self._schedulers = [(each, each.last_epoch) for each in found]
        modules = {id(module): module for module in root.modules()}
        self._modules |= modules
        self._roots = [*(each for each in self._roots if id(each) not in modules), root]
        is_flat = any(isinstance(module, FullyShardedDataParallel) for module in modules.values())
        known = {param.facts.name for param in self._params.values()}
        for name, value in root.named_parameters():
            if id(value) in self._params:
                continue
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")  # noqa: PLW2901
            name = f"model {len(self._roots)}: {name}" if name in known else name  # noqa: PLW2901
            is_whole = not isinstance(value, DTensor) and not hasattr(value, "ds_tensor") and not is_flat
            sample = sample_of(value)
            self._params[id(value)] = _Param(
                ParamFacts(name, value.ndim, value.requires_grad, is_whole), value, sample, sample
            )
            if value.requires_grad:
                self._handles.append(value.register_post_accumulate_grad_hook(self._on_gradient))  # type: ignore[no-untyped-call]
            if isinstance(value, DTensor):
                names = set(value.device_mesh.mesh_dim_names or ())
                self.facts.splits_samples |= value.device_mesh.ndim > 1 or bool(names & {"tp", "cp", "sp", "ep"})
        for name, module in root.named_modules():
            mean = getattr(module, "running_mean", None)
            if isinstance(mean, Tensor) and not any(param.requires_grad for param in module.parameters()):
                self._means[name] = (mean, mean.clone())

    def _end(self, call: Call, outputs: list[Tensor]) -> None:
        logits = [each for each in (*outputs, call.logits) if is_logits(each, call)]
        if self._replay is not None:
            hidden = [] if call.hidden is None else [call.hidden]  # a fused loss has no logits
            call.output = next(iter([*logits, *hidden, *outputs]), None)
            return
        self.facts.calls.append(call.facts)
        call.logits = call.hidden = None
        outputs = [each for each in outputs if each.requires_grad]
        inputs = next((each for each in (call.ids, *tensors_in((call.args, call.kwargs))) if each is not None), None)
        if not outputs or inputs is None or not inputs.ndim:
            return
        self._first = self._first or call
        call.facts.rows = [digest_of(row) for row in inputs[:64]]
        for each in outputs:  # the loss may depend on any of them
            each.register_hook(partial(self._on_backward, call.facts))  # type: ignore[no-untyped-call]
        for each in {id(each): each for each in logits if each.requires_grad}.values():
            sample = some_rows(each).clone()
            each.register_hook(partial(self._on_logits, call, sample))  # type: ignore[no-untyped-call]
        if not logits:
            read_labels(call)

    def _on_gradient(self, value: Tensor) -> None:
        with self._guarded():
            if value.grad is not None:
                self._params[id(value)].largest = largest_in(value.grad)

    def _on_backward(self, facts: CallFacts, _: Tensor) -> None:
        with self._guarded():
            calls = self.facts.calls
            is_first = not any(each.backward and each.step == facts.step for each in calls)
            is_new = any(facts is each for each in calls[self._num_before_backward :])
            if is_new:  # otherwise the same backward pass goes through two calls
                self._num_backwards, self._num_before_backward = self._num_backwards + 1, len(calls)
                # FSDP2 accumulates in other tensors.
                own = [each for each in self._params.values() if each.facts.is_comparable and each.facts.is_trained]
                had = [each for each in own if each.facts.in_optimizer and each.facts.is_nonzero][:64]
                kept = [each.value.grad is not None and bool(each.value.grad.any()) for each in had]
                self.facts.keeps_gradients |= is_first and any(kept)
                if is_first:
                    self._num_before_step = self._num_updates
                else:
                    self.facts.loses_gradients |= bool(kept) and not any(kept)
                    moved = (not torch.equal(sample_of(each.value), each.last) for each in own[:64])
                    self.facts.moves_weights |= self._num_updates > self._num_before_step or any(moved)
            facts.backward = self._num_backwards

    def _on_logits(self, call: Call, sample: Tensor, gradient: Tensor | None) -> None:
        # The whole output's gradient comes before its parts'. DDP's copy of the logits has none.
        if gradient is not None and call.facts.counts is None and call.ids is not None:
            with self._guarded():
                read_gradient(call, call.ids, sample, gradient)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if not self._roots or not self._is_watching():
            return
        with self._guarded():
            self._num_updates += 1
            if not any(optimizer is each for each in self._optimizers):
                self._optimizers.append(optimizer)
            rates = {id(value): float(group["lr"]) for group in optimizer.param_groups for value in group["params"]}
            if optimizer is self._optimizers[0]:
                self.facts.num_steps += 1
                self.facts.rates.append(max(rates.values(), default=0.0))
            self.facts.num_others = max(self.facts.num_others, sum(key not in self._params for key in rates))
            words = [type(optimizer).__name__, *optimizer.defaults, *next(iter(optimizer.state.values()), ())]
            text = " ".join(map(str, words)).lower()
            self.facts.corrects_rounding |= any(part in text for part in _CORRECTIONS)
            others = {id(v) for other in self._optimizers for group in other.param_groups for v in group["params"]}
            for key, param in self._params.items():
                param.facts.is_trained |= param.value.requires_grad  # parts can alternate, or start later
                if param.facts.is_trained and (key in rates or key not in others):
                    _observe_step(param, rates.get(key))

    def _collect(self) -> None:
        facts, modules = self.facts, self._modules.values()
        called = {
            id(value) for module in modules for value in module.parameters(recurse=False) if id(module) in self._called
        }
        for key, param in self._params.items():
            last = sample_of(param.value)
            param.facts.is_called, param.facts.digest = key in called, digest_of(last)
            param.facts.has_changed = not torch.equal(last, param.first)
            facts.params.append(param.facts)
        facts.statistics = [name for name, (now, before) in self._means.items() if not torch.equal(now, before)]
        facts.num_dropouts = sum(map(_drops, modules))
        facts.is_untied = any(_is_untied(module, self._params) for module in modules)
        if len(self._optimizers) > 1:  # one optimizer's backward pass can leave gradients for another
            facts.keeps_gradients = facts.loses_gradients = False
        for each, before in self._schedulers:
            optimizer = getattr(each.optimizer, "optimizer", each.optimizer)  # accelerate's wraps it
            is_own = any(optimizer is other for other in self._optimizers)
            values = {id(value) for group in optimizer.param_groups for value in group["params"]}
            if is_own or any(key in values and param.facts.in_optimizer for key, param in self._params.items()):
                facts.schedulers.append((each.last_epoch - before, is_own))

    def _replay_first(self, call: Call) -> ReplayFacts:
        """Call the model again with the first batch: unchanged, with changed tokens, and in evaluation mode."""
        root = unwrapped(call.model)
        buffers = [(buffer, buffer.clone()) for buffer in root.buffers()]
        modes = [(module, module.training) for module in root.modules()]
        state = random.getstate()

        def run(seed: int, changed: Tensor | None = None) -> Tensor:
            torch.manual_seed(seed)
            random.seed(seed)
            self._replay = replay = Call(root, CallFacts(0, False, False), ids=call.ids, changed=changed)  # noqa: FBT003
            try:
                root(*call.args, **call.kwargs)
            finally:
                self._replay = None
            if replay.output is None:
                raise ValueError("its output has no tensor")
            return replay.output

        eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        device = next(root.parameters()).device
        devices = [device] if device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices), warnings.catch_warnings(), eager:
                warnings.simplefilter("ignore")
                facts = compare_inputs(call, run)
                root.eval()
                facts.evaluation = difference_of(run(1), run(2)).max().item()
                return facts
        finally:
            random.setstate(state)
            for module, mode in modes:
                module.training = mode
            for buffer, before in buffers:
                buffer.copy_(before)


def _observe_step(param: _Param, rate: float | None) -> None:
    """Record a parameter's gradient and change in a step; `rate` is None if no optimizer has the parameter."""
    facts, value, new = param.facts, param.value, sample_of(param.value)
    largest, param.largest = param.largest if value.grad is None else largest_in(value.grad), None
    facts.in_optimizer |= rate is not None
    facts.was_zero = not param.last.any()
    facts.began_zero |= param.last is param.first and facts.was_zero
    if largest is not None:
        facts.has_received = True
        facts.is_nonzero |= bool(largest != 0)
        facts.is_nonfinite |= not largest.isfinite()
        has_gradient = torch.zeros_like(new) if value.grad is None else sample_of(value.grad) != 0
        if rate and (num := int(has_gradient.sum())):
            facts.rounded = int(((new == param.last) & has_gradient).sum()) / num
    param.last = new


def _drops(module: nn.Module) -> bool:
    return isinstance(module, _DROPOUTS) and module.p > 0


def _is_untied(model: nn.Module, params: Mapping[int, _Param]) -> bool:
    """Return whether a configuration ties embedding and output layer, which have two weights, and one is trained."""
    config: Any = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False) or not hasattr(model, "get_output_embeddings"):
        return False
    layers: tuple[Any, ...] = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    known = {id(each.weight): params.get(id(each.weight)) for each in layers if hasattr(each, "weight")}
    return len(known) > 1 and all(known.values()) and any(each and each.facts.is_trained for each in known.values())
