"""Train tiny multimodal models on pictures, of each family of `picture_families`, as `scripts/families --pictures`."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from family_matrix import TRAINING, Tried, adapters_of, parts_of, said
from peft import PeftModel
from picture_families import class_loss, make_documents, pack_of, picture_inputs, tiny_picture_model
from transformers import AutoModelForImageTextToText

from ftkit.planning.layout import RunLayout
from ftkit.train.causal_lm import CausalLM
from ftkit.train.components.exporter import export
from ftkit.train.components.pictures import PictureFeed
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.distributed.verification import choose_packing, verify_causality, verify_logits, verify_sharding
from ftkit.train.model.attention import choose_kernel, register_kernel
from ftkit.train.model.hf_model import build_empty
from ftkit.train.model.lora import init_adapters, prepare_method
from ftkit.train.model.pretrained import load_weights
from ftkit.train.model.token_mixers import choose_token_mixers
from ftkit.train.param_count import count_method
from ftkit.train.world import World

if TYPE_CHECKING:
    from ftkit.config.training import Method, TrainingPlan
    from ftkit.train.causal_lm import MicroBatch

COLUMNS = ("packed", "gradients", "adapters", "4 bits", "exported")
LENGTH, STEPS = 256, 3


def try_pictures(name: str, world: World) -> Tried:
    """Run everything that ftkit does with a multimodal model on a tiny model of a family."""
    model = tiny_picture_model(name)
    results = dict.fromkeys(COLUMNS, "not tried")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        choose_token_mixers(model, world)
        tried = _Family(name, model, Path(folder), world)
        results["packed"] = said(tried.pack)
        if results["packed"] == "yes":
            results["gradients"] = said(tried.compare_gradients)
            results["adapters"] = said(lambda: tried.train("lora"))
            results["4 bits"] = said(lambda: tried.train("qlora"))
            results["exported"] = said(lambda: tried.train("full"))
    return Tried(name, type(model).__name__, results)


@dataclass(frozen=True)
class _Family:
    name: str
    model: Any  # as its own class computes it
    folder: Path
    world: World

    def pack(self) -> str:
        """Run the checks before step 1, and compare losses of packs with those of the class."""
        engine, _ = self._engine("full")
        probe, reason = choose_packing(engine, self.world, "auto", 320, TRAINING, pictures=self._feed())
        if reason is not None:
            return reason
        verify_causality(probe)
        verify_logits(probe)
        documents = make_documents(self.model, self.name)
        each = [float(class_loss(self.model, self.name, one).detach()) for one in documents]
        with engine.inference() as own:
            alone = [float(own(batch=self._pack([one]))) for one in documents]
            together = float(own(batch=self._pack(documents)))
        difference = max(
            abs(found / expected - 1) for found, expected in zip([*alone, together], [*each, sum(each)], strict=True)
        )
        return "yes" if difference < 1e-5 else f"losses differ by {difference:.0e}"

    def compare_gradients(self) -> str:
        """Compare the gradients of a pack with those of the class, relative to the norm of all."""
        documents, trained = make_documents(self.model, self.name), [*self.model.parameters()]
        total = torch.stack([class_loss(self.model, self.name, one) for one in documents]).sum()
        expected = torch.autograd.grad(total, trained, allow_unused=True)
        found = torch.autograd.grad(CausalLM(self.model)(batch=self._pack(documents)), trained, allow_unused=True)
        pairs = [
            (one, other) for one, other in zip(found, expected, strict=True) if one is not None and other is not None
        ]
        norm = torch.stack([other.norm() for _, other in pairs]).norm()
        difference = float(torch.stack([(one - other).norm() for one, other in pairs]).norm() / norm)
        return "yes" if difference < 3e-5 else f"gradients differ by {difference:.0e}"

    def train(self, method: Method) -> str:
        """Train tower and text, or adapters; export them, load them with transformers or peft, and compare losses."""
        engine, training = self._engine(method)
        documents = make_documents(self.model, self.name)
        batch = self._pack(documents)
        losses = []
        for _ in range(STEPS):
            loss = engine.forward(batch)
            engine.backward(loss, len(batch.labels), is_last=True)
            losses.append(float(loss.detach()))
            engine.step(TRAINING.learning_rate, 1.0)
        if not (math.isfinite(losses[-1]) and losses[-1] < losses[0]):
            return f"the loss does not fall: {', '.join(f'{loss:.4f}' for loss in losses)}"
        if method == "qlora":
            return "yes"
        parts = parts_of(self.folder, training, self.model.config, self.folder if method == "lora" else None)
        export(engine, parts, RunLayout(self.folder), 0, self.world)
        base = AutoModelForImageTextToText.from_pretrained(self.folder / "export" if method == "full" else self.folder)
        loaded = base if method == "full" else PeftModel.from_pretrained(base, self.folder / "export").base_model.model
        with engine.inference() as own:
            trained = float(own(batch=batch))
        exported = sum(float(class_loss(loaded.eval(), self.name, one).detach()) for one in documents)
        difference = abs(exported / trained - 1)
        return "yes" if difference < 1e-5 else f"the loss of the export differs by {difference:.0e}"

    def _pack(self, documents: Any) -> MicroBatch:
        return pack_of(documents, LENGTH, self._feed())

    def _feed(self) -> PictureFeed:
        feed = PictureFeed.of(self.model, picture_inputs(self.name))
        assert feed is not None
        return feed

    def _engine(self, method: Method) -> tuple[Fsdp2Engine, TrainingPlan]:
        kernel, _ = choose_kernel(TRAINING, self.model.config, self.world)
        model: Any = build_empty(self.model.config, register_kernel(kernel))
        choose_token_mixers(model, self.world)
        lora = adapters_of(model, use_dora=False) if method != "full" else None
        training = TRAINING.model_copy(
            update={"method": method, "lora": lora, "vision": "full" if lora is None else "frozen"}
        )
        expected = count_method(model, training)
        prepare_method(model, training, self.world.device)

        def initialize(sharded: Any) -> None:
            load_weights(sharded, self.folder)
            init_adapters(sharded, 0)

        engine = Fsdp2Engine(model, training, self.world, initialize)
        verify_sharding(engine.sharding_stats(), training, expected)
        return engine, training
