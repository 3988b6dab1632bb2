"""Device placement for inference: one device, or layers spread over several."""

from __future__ import annotations

import pytest
import torch
from family_matrix import tiny_config
from transformers import AutoModelForCausalLM

from ftkit.errors import PrerequisiteError
from ftkit.evaluate.loaded_model import place, split_layers, weight_bytes
from ftkit.health.rates import DeviceProcesses, MeasureError

pytestmark = pytest.mark.train


def empty_model(family: str, *, ties: bool) -> torch.nn.Module:
    config = tiny_config(family)
    config.tie_word_embeddings = ties
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("ties", [False, True])
def test_whole_layers_are_spread_over_as_few_gpus_as_needed(family: str, ties: bool) -> None:
    model = empty_model(family, ties=ties)
    whole = weight_bytes(model)
    split = split_layers(model, {0: int(0.7 * whole), 1: int(0.7 * whole)})
    assert split is not None
    assert set(split.values()) == {0, 1}
    placed = {name: next(gpu for prefix, gpu in split.items() if not prefix or f"{name}.".startswith(f"{prefix}."))
              for name, _ in model.named_parameters()}  # fmt: skip
    for gpu in (0, 1):
        assert sum(model.get_parameter(name).nbytes for name, at in placed.items() if at == gpu) <= 0.7 * whole
    for number in range(4):
        assert len({gpu for name, gpu in placed.items() if f".layers.{number}." in name}) == 1
    assert split_layers(model, {0: whole // 3, 1: whole // 3}) is None


def test_a_model_that_does_not_fit_is_rejected_with_the_memory_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 1000))
    gpus = [torch.device("cuda", number) for number in range(2)]
    with pytest.raises(PrerequisiteError, match=r"2 GPUs here have room for 0\.0 GiB"):
        place(empty_model("llama", ties=True), gpus)


def test_hooks_between_devices_do_not_change_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parts are on the CPU here; accelerate's hooks do the same on GPUs."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(tiny_config("llama")).eval()
    prompt = torch.tensor([[5, 6, 7, 8]])
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False)
    import accelerate

    dispatch = accelerate.dispatch_model
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (weight_bytes(model), 0))
    monkeypatch.setattr(
        accelerate, "dispatch_model",
        lambda model, split: dispatch(model, dict.fromkeys(split, "cpu"), force_hooks=True),
    )  # fmt: skip
    place(model, [torch.device("cuda", number) for number in range(2)])
    assert any(hasattr(module, "_hf_hook") for module in model.modules())
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has GPUs here")
def test_the_checks_of_a_node_say_why_torch_cannot_use_its_gpus() -> None:
    processes = DeviceProcesses("cuda", 1)
    try:
        with pytest.raises(MeasureError, match=r"torch can't use GPU 0: .*(CUDA|NVIDIA)"):
            processes.rates(is_short=True)
    finally:
        processes.close()
