"""Training settings as given, and with all `auto` values resolved."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from ftkit.config.objectives import ObjectiveSpec, ReferencedSpec, usual_learning_rate
from ftkit.errors import plural
from ftkit.models.adapters import ALL_PROJECTIONS, LoraSpec
from ftkit.models.vision import Vision
from ftkit.spec import (
    LARGEST_COUNT,
    NUMBER,
    WHOLE_NUMBER,
    Float,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
)

EngineName = Literal["fsdp2", "zero3"]
ActivationCheckpointing = Literal["none", "selective", "except_attention", "full"]
RECOMPUTES_LAYERS: tuple[ActivationCheckpointing, ...] = ("except_attention", "full")
"""Modes that recompute whole layers."""
Auto = Literal["auto"]
AttentionChoice = Literal["auto", "flash4", "cudnn", "flex", "sdpa", "eager"]
Method = Literal["full", "lora", "qlora"]
Offload = Literal["none", "optimizer", "all"]
OnNonfinite = Literal["stop", "skip"]
Precision = Literal["bf16", "fp32"]
TrainingPrecision = Literal["bf16", "fp32", "fp8"]
Quantization = Literal["none", "nf4", "fp8"]

LARGEST_GROUP, LONGEST_SEQUENCE = 2**16, 2**24
"""Upper bounds far above anything that fits in memory. They limit the search over divisors and halvings."""


def _number_or_auto(least: int, what: str) -> BeforeValidator:
    """Accept a whole number of `least` to `LARGEST_GROUP`, or `auto`."""

    def check(value: object) -> object:
        is_number = isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST_GROUP
        if is_number or value == "auto":
            return value
        raise ValueError(f"{what.format(LARGEST_GROUP)}, or 'auto'")

    return BeforeValidator(check)


def _as_int_if_whole(number: float) -> float:
    return int(number) if number.is_integer() else number


_MICRO_BATCH = _number_or_auto(1, "a micro-batch is 1 to {:,} packs")
_SHARD_DEGREE = _number_or_auto(2, "a copy of the model is sharded over 2 to {:,} GPUs")


class TrainingSpec(ObjectiveSpec):
    """Optimization settings."""

    method: Method = "full"
    """Parameters to train: all (`full`), adapters (`lora`), or adapters on 4-bit weights in NF4 (`qlora`)."""
    lora: LoraSpec | None = None
    """The adapters of methods lora and qlora. Default if null."""
    vision: Vision = "frozen"
    """Weights of a multimodal model to train in addition to those of `method`, on data with pictures: none, the
    projector of picture features into the text model, or projector and vision tower. Adapter files can't hold these
    weights, so the merged model is exported."""
    vision_learning_rate: PositiveFloat | None = None
    """Highest learning rate of the weights that `vision` trains. `learning_rate` if null."""
    context_parallel: PositiveInt = 1
    """Number of GPUs of a node that divide the tokens of each pack, for packs that don't fit on one GPU (engine fsdp2).
    This number, and its product with tensor_parallel, must divide the number of attention heads."""
    tensor_parallel: PositiveInt = 1
    """Number of GPUs of a node that divide the matrices of each decoder layer (llama, qwen3, gemma3_text, olmo3;
    methods full and lora, engine fsdp2). It must divide the query and key-value heads, and the intermediate size."""
    engine: Literal["auto", "fsdp2", "zero3"] = "auto"
    """Engine that shards the model over processes; `auto` chooses, and the plan shows the reason."""
    offload: Offload = "none"
    """State kept in host memory: none, optimizer states, or also parameters and gradients."""
    precision: TrainingPrecision = "bf16"
    """Precision of forward and backward, and of frozen weights; master weights and optimizer states are fp32. `fp8`,
    with method full and engine fsdp2: linear layers multiply in FP8 (tensorwise scaling; Ada, Hopper and newer)."""
    fp8_all_gather: bool = True
    """Whether several GPUs all-gather trained matrices in FP8, with precision fp8: half the bytes, and half the memory
    of layers that stay unsharded. With offload all, they are all-gathered in bf16."""
    base_precision: Literal["auto", "fp8"] = "auto"
    """Precision of frozen weights with method lora. `fp8`: the linear layers of decoder layers store 8 bits per weight
    and multiply in FP8 (Ada, Hopper and newer GPUs), with half the memory of bf16; `auto`: that of `precision`."""
    sequence_length: Annotated[int, Field(gt=0, le=LONGEST_SEQUENCE), WHOLE_NUMBER] = 2048
    """Tokens per pack. If not given, 2048, or the model's positions if it has fewer."""
    micro_batch_size: Annotated[PositiveInt | Auto, _MICRO_BATCH] = "auto"
    """Packs per micro-batch of a process; `auto`: the number that is predicted to be fastest on the cluster's GPUs,
    with memory to spare. It affects only speed and memory: the optimizer step uses `global_batch_size`."""
    global_batch_size: PositiveInt = 16
    """Packs per optimizer step, over all processes and accumulation steps."""
    max_steps: PositiveInt | None = None
    """Number of optimizer steps; the data is repeated as needed. Set this or num_epochs. In an override, or in a recipe
    that extends another, it replaces num_epochs."""
    num_epochs: Annotated[float, Field(gt=0, le=LARGEST_COUNT), AfterValidator(_as_int_if_whole), NUMBER] | None = None
    """Number of passes over the data, also fractional (0.5, 2.5). Replaces max_steps. If neither is given, 1."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit`: 8-bit instead of 32-bit states, with engine fsdp2 and without offload; needs bitsandbytes."""
    learning_rate: PositiveFloat = Field(
        default_factory=lambda fields: usual_learning_rate(fields.get("objective", ""), fields.get("method", ""))
    )
    """Highest learning rate, reached after the warm-up. If not given: with method full, 2e-5, or 5e-7 on preferences
    (`orpo`: 8e-6); for adapters, ten times that."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """How the learning rate changes after the warm-up."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1), NUMBER] = 0.03
    """Fraction of all steps during which the learning rate rises from 0."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1), NUMBER] = 0.0
    """Final learning rate of cosine and linear, as a fraction of the highest."""
    betas: tuple[Float, Float] = (0.9, 0.95)
    """AdamW's decay rates."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay, of matrices; biases and norms have none."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm. A large one, such as 1e9, turns clipping off."""
    router_aux_loss_coef: NonNegativeFloat | None = None
    """Weight of the load-balancing loss of a mixture of experts, computed per pack (per padded document without
    packs) as in transformers. If null, the value in config.json if `output_router_logits` is true there, else 0; with
    adapters, 0."""
    attention: AttentionChoice = "auto"
    """Attention kernel: `flash4` (flash-attn-4) or `cudnn` (nvidia-cudnn-frontend), both for Hopper and newer; `flex`
    (any CUDA device), `sdpa` (any device); `auto` selects the fastest kernel that supports the GPU and the model;
    `eager` works for all models."""
    compile: Literal["auto", "layers", "none"] = "auto"
    """`layers`: compile each decoder layer, which fuses element-wise operations; `auto`: on GPUs, with engine fsdp2."""
    deterministic: bool = False
    """Whether the same run on the same GPUs repeats bit for bit. Then there are no CUDA graphs and no cuDNN attention;
    linear attention is refused, and an operation that can't repeat ends the run. CPUs repeat without."""
    cuda_graphs: bool = True
    """On one GPU, capture the compiled decoder as CUDA graphs where possible, so that the host's speed does not limit
    short micro-batches."""
    activation_checkpointing: Literal["auto", "none", "selective", "except_attention", "full"] = "auto"
    """Activations that the backward pass recomputes: nothing (`none`); the cheap operations between matmuls and
    attention (`selective`, with engine fsdp2); decoder layers except attention (`except_attention`, with engine fsdp2),
    for long sequences, where attention takes most of the time; or whole decoder layers (`full`), for the least memory
    and a third more time. `auto`: the mode that is predicted to be fastest, with memory to spare."""
    checkpointed_layers: PositiveInt | None = None
    """Number of decoder layers that use the mode of `activation_checkpointing`: the model's first layers, or with
    `activation_offload` evenly spread ones. The others use `selective` (`none` with engine zero3, or if the mode is
    `selective`). All if null; with `auto` checkpointing, the number that memory requires."""
    activation_offload: bool = False
    """Keep the activations that checkpointed decoder layers save in host memory until the backward pass: their inputs;
    if compiled, also the outputs of attention (`except_attention`), or of attention and matmuls (`selective`)."""
    offloaded_layers: NonNegativeInt | None = None
    """Number of the layers with `selective` checkpointing to which `activation_offload` applies, spread evenly. All if
    null; with `auto` checkpointing, the number that is predicted to be fastest."""
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """Whether decoder layers are resharded after the forward pass and all-gathered again for the backward pass.
    `never`, with engine fsdp2: less traffic, more memory; `auto`: `never` if the GPU has memory to spare."""
    shard_degree: Annotated[PositiveInt | Auto, _SHARD_DEGREE] = "auto"
    """Number of GPUs that shard one copy of the model, with engine fsdp2; a divisor of the number of GPUs. If it is
    smaller, groups of GPUs hold replicas (hybrid sharding, HSDP), with less traffic between nodes and more memory.
    `auto`: all GPUs, or those of one or a few nodes if the network is predicted to slow steps down otherwise."""
    sync_gradients: Literal["auto", "every_micro_batch", "last_micro_batch"] = "auto"
    """When the gradients of accumulated micro-batches are reduced over the GPUs. `last_micro_batch`, with engine fsdp2:
    once per step; this reduces traffic, but each GPU keeps unsharded sums in `reduce_precision` until then. `auto`:
    `last_micro_batch` between nodes, if it is predicted to be faster and the GPU has memory to spare."""
    reduce_precision: Precision = "fp32"
    """Precision of gradient reduction over the processes; `bf16` halves the traffic, and rounds each sum."""
    collectives: Literal["auto", "nccl", "copy_engine"] = "auto"
    """Backend of collectives between GPUs, with engine fsdp2: NCCL, whose kernels occupy SMs that matmuls could use, or
    the copy engines, on one host with NVLink (torch 2.11 or newer); `auto`: copy engines where they work."""
    on_nonfinite: OnNonfinite = "stop"
    """Reaction to a step whose loss or gradient is NaN or infinite. Such a step never updates the weights; then the run
    ends (`stop`), or continues with the next batch (`skip`) and ends after ten such steps in a row."""
    checkpoint_every_steps: PositiveInt = 300
    """Steps between checkpoints; one is always written at the end."""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints to keep; the best one is kept too (`evaluation.best`)."""
    keep_every_steps: PositiveInt | None = None
    """Also keep the checkpoints of all steps that are a multiple of this. None if null."""
    max_failed_checkpoints: NonNegativeInt = 2
    """Maximum consecutive checkpoints that may fail to be written while training continues; the final one must not."""
    log_every_steps: PositiveInt = 10
    """Steps between records in metrics.jsonl."""
    seed: Seed = 0
    """Seed of the initial weights, of dropout, and of the order of the data."""
    data_seed: Seed | None = None
    """Seed of the order of the data. `seed` if null."""

    @property
    def order_seed(self) -> int:
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def adapters(self) -> LoraSpec | None:
        """The adapters to train, by default on Llama's linear layers; None if all weights are trained."""
        return None if self.method == "full" else _with_default_targets(self.lora or LoraSpec.model_construct())

    def with_targets(self, targets: tuple[str, ...]) -> Self:
        """Return the settings with these adapter targets, if there are adapters and the recipe sets no targets."""
        lora = self.lora or LoraSpec.model_construct()
        if self.method == "full" or lora.targets:
            return self
        return self.model_copy(update={"lora": lora.model_copy(update={"targets": targets})})

    @property
    def compute_precision(self) -> Precision:
        """The precision of all computation except FP8 matmuls."""
        return "fp32" if self.precision == "fp32" else "bf16"

    @property
    def compute_bytes(self) -> int:
        return 4 if self.precision == "fp32" else 2

    @property
    def reduce_bytes(self) -> int:
        return 2 if self.reduce_precision == "bf16" else 4

    @property
    def sends_fp8(self) -> bool:
        """Whether sharded trained matrices are all-gathered in FP8."""
        return self.fp8_all_gather and self.precision == "fp8" and self.offload != "all"

    @property
    def gpus_per_pack(self) -> int:
        """GPUs that divide the tokens of each pack."""
        return self.context_parallel * self.tensor_parallel

    @property
    def quantization(self) -> Quantization:
        """Storage format of frozen linear layers in decoder layers, if not the compute precision."""
        if self.method == "qlora":
            return "nf4"
        return "fp8" if self.base_precision == "fp8" else "none"

    @property
    def trains_in_fp8(self) -> bool:
        return self.precision == "fp8"

    @property
    def multiplies_in_fp8(self) -> bool:
        return self.trains_in_fp8 or self.base_precision == "fp8"

    @model_validator(mode="before")
    @classmethod
    def _one_epoch_by_default(cls, fields: object) -> object:
        if not isinstance(fields, dict) or {"max_steps", "num_epochs"} & fields.keys():
            return fields
        return {**fields, "num_epochs": 1}

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _checkpointing_is_a_word(cls, value: object) -> object:
        if isinstance(value, bool):
            allowed = ", ".join(("auto", *get_args(ActivationCheckpointing)))
            raise ValueError(f"set '{'full' if value else 'none'}': it is one of {allowed}")  # noqa: TRY004
        return value

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        for conflict in (
            *self.conflicts_of_objective(),
            *self._conflicts_of_method(),
            *self._conflicts_of_memory(),
            *self._conflicts_of_groups(),
        ):
            raise ValueError(conflict)
        return self

    @property
    def stores_reference(self) -> bool:
        """Whether the reference's log-probabilities are computed once before step 1 and stored."""
        stored = ("auto", "stored") if self.method == "full" else ("stored",)
        return isinstance(self.preferences, ReferencedSpec) and self.preferences.reference in stored

    def _conflicts_of_method(self) -> Iterator[str]:
        if self.method == "full" and self.has_reference and not self.stores_reference:
            yield f"{self.objective}.reference 'adapters_off' is for adapters, and method 'full' has none: set 'stored'"
        if self.method == "full" and self.lora is not None:
            yield "lora has no effect with method 'full': set method to 'lora' or 'qlora', or remove it"
        if self.trains_in_fp8 and self.method != "full":
            fix = "set base_precision to 'fp8' instead" if self.method == "lora" else "omit it: they have 4 bits"
            yield f"precision '{self.precision}' trains all weights; with method '{self.method}' {fix}"
        if self.base_precision == "fp8" and self.method != "lora":
            yield f"base_precision is for method 'lora'; with method '{self.method}' omit it"
        if self.base_precision == "fp8" and self.precision == "fp32":
            yield "base_precision 'fp8' returns bf16 from its matmuls: it is incompatible with precision 'fp32'"
        if self.vision == "frozen" and self.vision_learning_rate is not None:
            yield "vision_learning_rate has no effect with vision 'frozen': set vision to 'projector' or 'full'"
        if self.precision == "fp32" and self.reduce_precision == "bf16":
            yield "reduce_precision 'bf16' would round the gradients of precision 'fp32'"
        if (self.max_steps is None) == (self.num_epochs is None):
            yield "give exactly one of max_steps and num_epochs"
        if not all(0 <= beta < 1 for beta in self.betas):
            yield f"betas must be in [0, 1), got {list(self.betas)}"

    def _conflicts_of_memory(self) -> Iterator[str]:
        mode = self.activation_checkpointing
        if self.activation_offload and mode == "none":
            yield "activation_offload has no effect with activation_checkpointing 'none'"
        if self.activation_offload and mode == "selective" and self.compile == "none":
            yield "activation_offload with activation_checkpointing 'selective' needs compiled layers: omit compile"
        if self.offloaded_layers is not None and not self.activation_offload:
            yield "offloaded_layers has no effect without activation_offload: set it to true"
        if mode == "except_attention" and self.attention == "eager":
            yield "activation_checkpointing 'except_attention' saves a kernel's output: attention 'eager' has no kernel"
        if self.checkpointed_layers is not None and mode in {"none", "auto"}:
            modes = "'selective', 'except_attention' or 'full': set one of them"
            yield f"checkpointed_layers is the number of layers with activation_checkpointing {modes}"
        if self.optimizer != "adamw" and self.offload != "none":
            yield f"optimizer '{self.optimizer}' needs its states on the GPU: omit offload '{self.offload}'"

    def _conflicts_of_groups(self) -> Iterator[str]:
        if self.sequence_length % self.gpus_per_pack:
            sizes = {key: getattr(self, key) for key in ("context_parallel", "tensor_parallel")}
            among = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1)
            yield f"sequence_length {self.sequence_length} can't be divided evenly among {among} GPUs"
        if self.context_parallel > 1 and self.attention in {"flex", "eager"}:
            yield f"context_parallel needs attention 'auto', 'flash4', 'cudnn' or 'sdpa', not '{self.attention}'"
        undivided = {
            "method": ("qlora",), "base_precision": ("fp8",), "precision": ("fp8",), "offload": ("optimizer", "all"),
            "collectives": ("copy_engine",), "attention": ("flex", "eager"),
        }  # fmt: skip
        wrong = [key for key, values in undivided.items() if getattr(self, key) in values]
        wrong += ["shard_degree"] if self.shard_degree != "auto" else []
        if wrong and self.tensor_parallel > 1:
            reason = " (quantized matrices can't be divided by rows or columns)" if self.quantization != "none" else ""
            value = getattr(self, wrong[0])
            yield f"tensor_parallel does not support {wrong[0]} '{value}' yet{reason}: leave one of them out"
        if self.collectives == "copy_engine" and self.offload == "all":
            yield "collectives 'copy_engine' is incompatible with offload 'all': weights are in host memory"
        if self.sync_gradients == "last_micro_batch" and self.collectives == "copy_engine":
            yield (
                "sync_gradients 'last_micro_batch' is incompatible with collectives 'copy_engine', which would sum "
                "micro-batches in the precision of training"
            )
        if self.sync_gradients == "last_micro_batch" and self.offload == "all":
            yield "sync_gradients 'last_micro_batch' is incompatible with offload 'all': gradients are in host memory"


@lru_cache(maxsize=16)
def _with_default_targets(lora: LoraSpec) -> LoraSpec:
    """Return adapters with targets; cached, since a plan calls this thousands of times."""
    return lora if lora.targets else lora.model_copy(update={"targets": ALL_PROJECTIONS})


class TrainingPlan(TrainingSpec):
    """Optimization settings with all `auto` values resolved."""

    micro_batch_size: PositiveInt = 1
    """Packs per micro-batch of a process."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Activations that the backward pass recomputes."""

    def checkpointing_of_layers(self, num_layers: int, engine: EngineName) -> list[ActivationCheckpointing]:
        mode, others = self.activation_checkpointing, self.lighter_checkpointing(engine)
        num = num_layers if self.checkpointed_layers is None else min(self.checkpointed_layers, num_layers)
        if self.activation_offload:
            return [mode if is_chosen else others for is_chosen in _spread(num, num_layers)]
        return [mode] * num + [others] * (num_layers - num)

    def offloaded_of_layers(self, num_layers: int, engine: EngineName) -> list[bool]:
        """Return for each decoder layer whether its saved activations are in host memory until the backward pass."""
        modes = self.checkpointing_of_layers(num_layers, engine)
        if not self.activation_offload:
            return [False] * num_layers
        num = modes.count("selective")
        selective = iter(_spread(num if self.offloaded_layers is None else min(self.offloaded_layers, num), num))
        return [next(selective) if mode == "selective" else mode != "none" for mode in modes]

    def lighter_checkpointing(self, engine: EngineName) -> ActivationCheckpointing:
        """Return the activation checkpointing of the layers beyond `checkpointed_layers`."""
        recomputes_layers = self.activation_checkpointing in RECOMPUTES_LAYERS
        return "selective" if recomputes_layers and engine == "fsdp2" else "none"

    def checkpointing_label(self, num_layers: int, engine: EngineName) -> str:
        modes = self.checkpointing_of_layers(num_layers, engine)
        numbers = {mode: modes.count(mode) for mode in (self.activation_checkpointing, *modes)}
        parts = [
            f"'{mode}'" + (f" in {number} of {num_layers} layers" if number < num_layers else "")
            for mode, number in numbers.items()
            if mode != "none" or number == num_layers
        ]
        if num_offloaded := sum(self.offloaded_of_layers(num_layers, engine)):
            parts.append(f"{plural(num_offloaded, 'layer')} offloaded")
        return ", ".join(parts)


@lru_cache
def _spread(num: int, total: int) -> tuple[bool, ...]:
    """Choose `num` of `total` items, spread evenly."""
    return tuple(index * num % total < num for index in range(total))
