"""The texts of errors of `config` and `models`: tests/golden/errors/{config,models}.txt.

`FTKIT_UPDATE_GOLDEN=1` rewrites the files: read the diff.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from error_texts import check_error_texts

from ftkit.config.context import Context, read_dotenv
from ftkit.config.image_reference import parse_image, parse_importable, parse_name, parse_reference
from ftkit.config.load import load_cluster, load_image, load_recipe
from ftkit.config.request import load_settings
from ftkit.config.yaml_files import parse_override, parse_yaml
from ftkit.models.architecture import ModelSpec
from ftkit.models.config_json import check_loadable, resolve_shape
from ftkit.models.folder import check_adapters, check_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OVERRIDES = {
    "unknown key": "training.learning_rat=1",
    "key of another tool": "training.lr=1",
    "wrong choice": "training.schedule=cosin",
    "wrong type": "training.max_steps=many",
    "wrong size": "training.warmup_ratio=5",
    "wrong mapping": "data.validation=0.1",
    "missing bracket": "tracking.sinks=wandb",
    "missing space": "training.lora={rank:8}",
    "missing quotes": "data.format.prompt={column}",
    "boolean for a word": "training.activation_checkpointing=true",
    "settings that contradict": "training.lora.rank=4",
    "unknown kind": "data.source.kind=hubb",
    "missing key": "data.source.kind=files",
    "address of another scheme": "data.source=https://host/data.jsonl",
    "code of a model": "model.trust_remote_code=true",
}


def failures_of_config(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    ctx = Context(folder, folder / "user", {})
    (folder / "recipes").mkdir()
    (folder / "recipes/mine.yaml").write_text(
        "name: mine\nextends: demo\ntraining:\n  learning_rate: fast\n  typo: 1\n"
    )
    yield "problems in a file", partial(load_recipe, "mine", ctx)
    for name, override in OVERRIDES.items():
        yield name, partial(load_recipe, "demo", ctx, [override])
    yield "unknown recipe", partial(load_recipe, "dmeo", ctx)
    yield "script as a recipe", partial(load_recipe, "train.py", ctx)
    (ctx.project / "chats.jsonl").touch()
    yield "data as a recipe", partial(load_recipe, str(ctx.project / "chats.jsonl"), ctx)
    yield "unknown cluster", partial(load_cluster, "a3-mega", ctx)
    yield "unknown image", partial(load_image, "olmo3:25.03", ctx)
    (folder / "ftkit.yaml").write_text("clutser: x\n")
    yield "unknown setting", partial(load_settings, ctx)
    (folder / ".env").write_text("LD_PRELOAD=x\nHF_TOKEN='\n")
    yield "variables of a project", partial(read_dotenv, folder)
    yield "key twice", partial(parse_yaml, "a: 1\na: 2\n", "x.yaml")
    yield "no YAML", partial(parse_yaml, "a: [1\n", "x.yaml")
    yield "no override", partial(parse_override, "training")
    yield "image reference", partial(parse_reference, "r.io/Team/x:1")
    yield "image of another scheme", partial(parse_image, "https://r.io/x:1", folder)
    yield "image name", partial(parse_name, "olmo3")
    yield "import of a file", partial(parse_importable, "./x.sqsh", folder)


def failures_of_models(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "no folder", partial(check_folder, folder / "nowhere")
    for name, files in {
        "empty": [], "bin": ["config.json", "pytorch_model.bin"], "shards": ["config.json", "zero_to_fp32.py"],
        "gguf": ["x.gguf"], "checkpoints": ["checkpoint-9/config.json", "checkpoint-10/config.json"],
        "both": ["config.json", "model.safetensors", "adapter_config.json"],
        "truncated": ["config.json", "model.safetensors"],
    }.items():  # fmt: skip
        for file in files:
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"model_type": "llama"}))
        (folder / name).mkdir(exist_ok=True)
        yield name, partial(check_folder, folder / name)
    yield "no adapters", partial(check_adapters, folder / "empty")
    yield "quantized", partial(check_loadable, {"quantization_config": {"quant_method": "awq"}}, "org/M-7B-AWQ")
    yield "dtype", partial(check_loadable, {"dtype": "bf16"}, "org/model")
    model = ModelSpec.model_validate({"weights": "org/model", "architecture": {"hidden_size": 8}})
    yield "unreadable configuration", partial(resolve_shape, model, None)
    yield "incomplete configuration", partial(resolve_shape, model, {"model_type": "llama"})
    yield "contradiction", partial(resolve_shape, model, {"model_type": "llama", "hidden_size": 16})


@pytest.mark.parametrize("failures", [failures_of_config, failures_of_models])
def test_golden_error_texts(
    failures: Callable[[Path], Iterator[tuple[str, Callable[[], object]]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ftkit.models.folder.socket.gethostname", lambda: "login1")
    check_error_texts(failures.__name__.removeprefix("failures_of_"), failures(tmp_path), {str(tmp_path): "/project"})
