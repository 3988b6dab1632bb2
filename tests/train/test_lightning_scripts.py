"""Scripts of Lightning, healthy ones and ones with a bug, where Lightning is installed: no extra of ftkit has it."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from script_models import gpt2, llama, lora, packed, rows
from torch.utils.data import DataLoader
from watched import observe

from ftkit.runs.script_checks import judge

if TYPE_CHECKING:
    from collections.abc import Callable

lightning: Any = pytest.importorskip("lightning", reason="needs Lightning: pip install lightning")
pytestmark = [pytest.mark.train, pytest.mark.filterwarnings("ignore")]

MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama, "gpt2": gpt2, "tied": lambda: llama(tie_word_embeddings=True), "lora": lambda: lora(llama()),
    "lora with dropout": lambda: lora(llama(), lora_dropout=0.1),
}  # fmt: skip
STYLES = {
    "its model": lambda module, batch: module.model(**batch),
    "itself by name": lambda module, batch: module(**batch),
    "itself with a batch": lambda module, batch: module(batch),
}
"""What a training step calls."""


def by_step(schedule: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda optimizer: {
        "optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"}
    }  # fmt: skip


SCHEDULES = {
    "cosine": by_step(lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, 100)),
    "warm-up": by_step(lambda each: torch.optim.lr_scheduler.LambdaLR(each, lambda step: min(1, step / 10))),
    "epochs": lambda each: ([each], [torch.optim.lr_scheduler.StepLR(each, 1)]),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {}, "accumulation": {"accumulate_grad_batches": 3}, "bf16": {"precision": "bf16-mixed"},
    "clipping": {"gradient_clip_val": 0.5}, "values": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "fp64": {"precision": "64-true"}, "all": {"precision": "bf16-mixed", "accumulate_grad_batches": 2,
                                              "gradient_clip_val": 1.0},
}  # fmt: skip
DATA: dict[str, dict[str, Any]] = {
    "whole": {}, "prompts": {"prompt": 6}, "right": {"padded": "right", "prompt": 4}, "left": {"padded": "left"},
}  # fmt: skip


class Module(lightning.LightningModule):  # type: ignore[misc]
    """A module around a model; `num_manual` batches are accumulated by manual optimization, if any."""

    def __init__(
        self, model: Any, style: str = "its model", schedule: Callable[[Any], Any] | None = None, rate: float = 1e-3,
        num_manual: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.style, self.schedule, self.rate, self.num_manual = model, style, schedule, rate, num_manual
        self.automatic_optimization = not num_manual

    def forward(self, batch: Any = None, **columns: Any) -> Any:
        return self.model(**(batch or columns))

    def training_step(self, batch: Any, number: int) -> Any:
        loss = STYLES[self.style](self, batch).loss
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss / self.num_manual)
        if (number + 1) % self.num_manual == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()
        return None

    def validation_step(self, batch: Any, _: int) -> None:
        STYLES[self.style](self, batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=self.rate)
        return self.schedule(optimizer) if self.schedule else optimizer


def drawn(**shape: Any) -> list[dict[str, Any]]:
    return [{name: values[number % 4] for name, values in rows(number, **shape).items()} for number in range(24)]


def fit(module: Any, data: Any = None, **settings: Any) -> None:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_steps=4, accelerator="cpu", devices=1, **quiet, **settings)
    data = drawn() if data is None else data
    trainer.fit(module, DataLoader(data, batch_size=2), DataLoader(data[:4], batch_size=2))


def fabric(
    *, num: int = 1, precision: str = "32-true", model: Callable[[], Any] = llama, is_averaged: bool = True
) -> None:
    """Train with Fabric, whose loop is the script's."""
    tool = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    with tool.init_module():
        made = model().train()
    wrapped, optimizer = tool.setup(made, torch.optim.AdamW([p for p in made.parameters() if p.requires_grad]))
    loader = iter(tool.setup_dataloaders(DataLoader(drawn(), batch_size=2)))
    for _ in range(4):
        for _ in range(num):
            loss = wrapped(**next(loader)).loss
            tool.backward(loss / num if is_averaged else loss)
        optimizer.step()
        optimizer.zero_grad()


def run(  # noqa: PLR0913 - what scripts differ in
    model: str, style: str = "its model", data: str = "whole", *, setting: str = "plain", schedule: str = "",
    labels: Callable[[Any], Any] | None = None, num_batches: int = 1, **options: Any,
) -> None:  # fmt: skip
    """Train a module of Lightning; `labels` changes those of each row."""
    module = Module(MODELS[model]().train(), style, SCHEDULES.get(schedule), **options)
    drawn_rows = [each | {"labels": labels(each["labels"])} if labels else each for each in drawn(**DATA[data])]
    fit(module, drawn_rows, **({"accumulate_grad_batches": num_batches} | SETTINGS[setting]))


def run_packed() -> None:
    fit(Module(llama(use_cache=False).train()), [{k: v[0] for k, v in packed(number).items()} for number in range(24)])


HEALTHY: dict[str, Callable[[], None]] = {
    **{", ".join(each): partial(run, *each) for each in product(MODELS, STYLES, DATA)},
    **{f"{model}, {name}": partial(run, model, setting=name) for model, name in product(MODELS, SETTINGS)},
    **{f"{name}, {number} batches": partial(run, "llama", schedule=name, num_batches=number)
       for name, number in product(SCHEDULES, (1, 3))},
    **{f"manual, {model}, {number} batches": partial(run, model, num_manual=number)
       for model, number in product(("llama", "lora"), (1, 2))},
    **{f"Fabric, {model}, {number} batches": partial(fabric, num=number, model=MODELS[model])
       for model, number in product(("llama", "tied", "lora"), (1, 3))},
    "Fabric, bf16": partial(fabric, precision="bf16-mixed"),
    "packed": run_packed,
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_script_of_lightning_gets_no_report(name: str) -> None:
    verdict = judge([observe(HEALTHY[name])])
    assert not verdict.findings
    assert "zero_grad" in verdict.passed


def freeze_adapters() -> None:
    """Train the head alone: freeze() of the module freezes adapters too."""
    module = Module(lora(llama()).train())
    module.freeze()
    module.model.base_model.model.lm_head.weight.requires_grad_(True)
    fit(module)


FAULTS: dict[str, tuple[Callable[[], None], str]] = {
    **{f"shifted labels, {style}": (partial(run, "llama", style, labels=lambda each: each.roll(-1)), "shift")
       for style in STYLES},
    **{f"no targets, {style}": (partial(run, "llama", style, labels=lambda each: each * 0 - 100), "targets")
       for style in STYLES},
    "rate 0": (partial(run, "llama", rate=0.0), "learning rate"),
    "frozen adapters": (freeze_adapters, "adapters"),
    "Fabric adds": (partial(fabric, num=3, is_averaged=False), "accumulation"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_script_of_lightning_is_found(name: str) -> None:
    script, check = FAULTS[name]
    assert check in {finding.check for finding in judge([observe(script)]).findings}
