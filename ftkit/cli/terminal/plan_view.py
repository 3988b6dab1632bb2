"""The plan as a table, and the messages before its script is printed or submitted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ftkit.cli.terminal.console import Cell, Facts, Styled, Terminal
from ftkit.cli.terminal.format import count, duration, gib, short_path
from ftkit.config.data import AutoFormat, describe_format, describe_too_long
from ftkit.config.data_sources import GeneratedSource
from ftkit.errors import plural
from ftkit.launch.inputs import available_formats, describe_detected
from ftkit.models.parameters import count_model
from ftkit.planning.step_time import longest_step
from ftkit.planning.training_setup import GPUS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.launch.preflight import Findings
    from ftkit.planning.fit import Moment
    from ftkit.planning.plan import JobPlan, RunPlan, ScriptPlan


def plan_facts(plan: RunPlan) -> Facts:
    image = plan.image if plan.container_image in (None, plan.image) else f"{plan.image}: {plan.container_image}"
    saved = plan.documents and plan.documents.saved
    return [
        ("run", Styled(plan.id, "bold")),
        ("model", _model(plan)),
        ("method", _method(plan)),
        ("engine", f"{plan.engine.name}: {plan.engine.reason}"),
        ("processes", _placement(plan)),
        ("batch", _batch(plan)),
        ("execution", _execution(plan)),
        ("steps", _steps(plan)),
        *_memory(plan),
        ("speed", _speed(plan)),
        *_place(plan),
        ("data", _data(plan)),
        ("documents", _documents(plan)),
        *_pictures(plan),
        *([("prompts", f"computed once for both sides of a pair: {saved:.0%} fewer tokens")] if saved else []),
        *([("sources", _shares(plan))] if len(plan.recipe.data.sources) > 1 else []),
        *_code(plan),
        *([("image", image)] if image else []),
        *(("note", Styled(note, "yellow")) for note in plan.notes),
    ]  # fmt: skip


def script_facts(plan: ScriptPlan) -> Facts:
    script, config = plan.script, plan.script.accelerate
    accelerate = "no configuration: accelerate and the Trainer replicate the model in every process"
    if config is not None:
        source = f"from recipe {script.recipe}" if script.recipe else "as given"
        kind, precision = config.get("distributed_type", "NO"), config.get("mixed_precision", "no")
        accelerate = f"{kind}, {precision}, {source}: accelerate.json"
    signal = "nothing is sent" if script.stop_signal == "none" else f"SIG{script.stop_signal} is sent to the script"
    again = "not restarted (--requeue)"
    if script.can_restart:
        restarts = plural(script.resources.max_restarts, "restart")
        again = f"restarted, to continue from its checkpoint; up to {restarts} after a crash"
    return [
        ("run", plan.id),
        ("script", " ".join([script.path, *script.args])),
        *_code(plan),
        ("processes", _placement(plan)),
        ("accelerate", accelerate),
        ("when stopped", f"{signal}; it is {again}"),
        *_place(plan),
        *([("image", plan.image)] if plan.image else []),
    ]


def _place(plan: JobPlan) -> Facts:
    runtime = "no container" if plan.cluster.runtime == "none" else f"container by {plan.cluster.runtime}"
    return [
        ("cluster", f"{plan.cluster.name}: {plan.cluster.scheduler}, {runtime}"),
        ("run folder", short_path(plan.layout.root)),
    ]


def _code(plan: JobPlan) -> Facts:
    facts: Facts = []
    for each in plan.code:
        commit = f", commit {each.commit[:12]}" if each.commit else ""
        changes = " with uncommitted changes" if each.has_uncommitted_changes else ""
        text = f"{each.name}: {short_path(Path(each.source))}, sha256 {each.sha256[:12]}{commit}{changes}"
        facts.append(("code", text))
    return facts


def show_findings(findings: Findings, terminal: Terminal) -> None:
    for warning in findings.warnings:
        terminal.warn(warning)
    findings.raise_errors()


def say_overridden(terminal: Terminal, project: Path) -> None:
    """Name the parts of job scripts that the project overrides, before a script is printed or submitted."""
    from ftkit.launch.templates import find_misnamed, find_overrides  # jinja2: 'ftkit plan' does without it

    for name in find_overrides(project):
        terminal.say(f"sbatch/{name} of this project overrides the shipped part")
    for name in find_misnamed(project):
        terminal.warn(f"sbatch/{name} of this project has no effect: no shipped part has that name")


def _model(plan: RunPlan) -> str:
    model = plan.recipe.model
    if model.weights == "random":
        source = "untrained"
    elif model.trained is not None:
        source = f"{model.source} (step {model.trained.step} of {model.trained.run})"
    else:
        source = model.source or model.weights
    if model.adapter is not None:
        source += f" on {model.weights}"
    if model.revision is not None:
        named = f" ({model.requested_revision})" if model.requested_revision else ""
        source += f" at {model.revision[:12]}{named}"
    if model.added_tokens:
        source += f", {plural(len(model.added_tokens), 'added token')}"
    shape = model.architecture
    counts = count_model(shape)
    about = "" if counts.is_exact else "about "
    experts = f", {about}{count(counts.active + counts.around)} active per token" if counts.experts_per_token else ""
    scaling = shape.rope_scaling
    positions = f", {shape.max_position_embeddings:,} positions by {scaling.rope_type}" if scaling else ""
    return (
        f"{shape.family}, {source}: {about}{plan.num_parameters:,} parameters{experts} "
        f"({plural(shape.num_hidden_layers, 'layer')}, width {shape.hidden_size}{positions})"
    )


def _method(plan: RunPlan) -> str:
    training = plan.recipe.training
    adapters = training.adapters
    rank = f", rank {adapters.rank} on {plural(len(adapters.targets), 'kind')} of projections" if adapters else ""
    trained = f"{plan.num_trained:,} parameters trained" if adapters else "all parameters trained"
    coefficient = training.router_aux_loss_coef
    balance = f", load-balancing loss × {coefficient:g}" if coefficient else ""
    base = f" on a base in {training.base_precision}" if training.base_precision == "fp8" else ""
    return f"{training.method} fine-tuning in {training.precision}{base}{rank}: {trained}{balance}"


def _placement(plan: JobPlan) -> str:
    place = plan.placement
    nodes, each = plural(place.num_nodes, "node"), plural(place.processes_per_node, "process")
    threads = plural(place.threads_per_process, "thread")
    device = f"on the CPU, {threads} each" if place.device == "cpu" else "one GPU each"
    spare = plan.resources.spare_nodes
    spares = f", and {plural(spare, 'spare node')}" if spare else ""
    return f"{nodes} × {each} = world size {place.world_size}, {device}{spares}"


def _batch(plan: RunPlan) -> str:
    batch = plan.batch
    together = plan.recipe.training.gpus_per_pack
    num = plan.placement.world_size // together
    fill = "" if plan.fill_ratio is None else f", {plan.fill_ratio:.1%} full"
    owners = plural(num, "process") if together == 1 else f"{plural(num, 'group')} of {together} processes"
    return (
        f"{plural(batch.micro_batch_size, 'pack')} × {owners} × "
        f"{batch.accumulation_steps} accumulation = {plural(batch.global_batch_size, 'pack')} "
        f"of {plan.recipe.training.sequence_length:,} tokens per step{fill}"
    )


def _execution(plan: RunPlan) -> str:
    settings = {
        "micro_batch_size": f"micro-batch {plan.recipe.training.micro_batch_size}",
        "activation_checkpointing": f"activation checkpointing {plan.checkpointing_label}",
    }
    marked = (text + (" (auto)" if name in plan.execution.chosen else "") for name, text in settings.items())
    return f"{', '.join(marked)}: {plan.execution.reason}"


def _steps(plan: RunPlan) -> str:
    training = plan.recipe.training
    epochs = plural(training.num_epochs, "epoch") if training.num_epochs else ""
    if plan.num_steps is None:
        return f"{epochs}; the step count is known once the data is prepared"
    most = plan.num_steps * plan.batch.global_batch_size * training.sequence_length
    tokens = f"up to {count(most)} tokens" if plan.num_tokens is None else f"{count(plan.num_tokens)} tokens"
    return f"{plan.num_steps:,} ({f'{epochs}, ' if epochs else ''}{tokens})"


def _memory(plan: RunPlan) -> Facts:
    """Return the predicted memory: the peak, with a bar of its parts, each drawn as its letter; and that of the host.

    `|` is the GPU's limit, if known.
    """
    memory, have = plan.memory, GPUS[plan.cluster.gpu].usable_gib if plan.cluster.gpu else 0.0
    most, limit = max(memory.total, have), f"; the GPU has {gib(have)} for tensors" if have else ""
    cells, legend, end = list[Styled](), list[Styled](), 0.0
    for (name, letter, color), amount in zip(_PARTS, memory.parts.values(), strict=True):
        end += amount
        style = f"black on {color}"
        cells += [Styled(letter, style)] * (round(_BAR * end / most) - len(cells))
        if amount:
            legend += [Styled(letter, style), Styled(f" {name} {gib(amount)}  ", "")]
    cells += [Styled("·", "dim")] * (_BAR - len(cells))
    if have:
        cells.insert(round(_BAR * have / most), Styled("|", "bold"))
    text = f"peak about {gib(memory.total)} per process, {_MOMENTS[memory.moment]}{limit}"
    facts: Facts = [("memory", text), ("", cells), ("", legend)]
    if host := plan.host_memory:
        is_compared = plan.cluster.scheduler == "local" or plan.cluster.memory_per_node_gib is not None
        unknown = "" if is_compared else "; the profile sets no memory_per_node_gib to compare it with"
        parts = " + ".join(f"{name} {gib(amount)}" for name, amount in host.parts.items() if amount)
        facts.append(("host memory", f"about {gib(host.total)} per node: {parts}{unknown}"))
    return facts


_BAR = 60
_PARTS = (
    ("parameters", "P", "blue"), ("gradients", "G", "magenta"), ("optimizer", "O", "yellow"),
    ("activations", "A", "green"), ("logits", "L", "cyan"), ("communication", "C", "red"), ("libraries", "R", "white"),
)  # fmt: skip
"""Names of the parts of `MemoryPlan`, with the letter and the color of each in the bar."""
_MOMENTS: dict[Moment, str] = {
    "teacher": "while the teacher computes",
    "loading": "while loading the weights",
    "pictures": "while the vision tower computes",
    "loss": "while computing the loss",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer step",
}


_NOTED_SLOWDOWN = 1.1  # the plan's own error


def span(show: Callable[[float], str], value: float, factor: float) -> str:
    """Show a number that may be up to `factor` times as large."""
    return " to ".join(dict.fromkeys(map(show, sorted((value, value * factor)))))


def _speed(plan: RunPlan) -> str:
    speed = plan.speed
    if speed is None:
        is_gpu = plan.placement.device == "cuda"
        return "not predicted: the profile sets no GPU model" if is_gpu else "not predicted on CPUs"
    each, slowdown = speed.tokens_per_second / plan.placement.world_size, speed.slow_host_seconds / speed.step_seconds
    longest = longest_step(plan.recipe, speed)
    rate, mfu = span(count, each, 1 / longest), span("{:.0%}".format, speed.mfu, 1 / longest)
    text = f"{span(duration, speed.step_seconds, longest)} per step, {rate} tokens/s per GPU ({mfu} MFU)"
    if longest == 1:
        text = f"about {text}"
    if plan.fill_ratio is None:
        text += " with full packs"
    if speed.bound != "gpu":
        text += f", limited by the {speed.bound}"
    if slowdown > max(_NOTED_SLOWDOWN, longest):
        text += f", {count(each / slowdown)} beside a slow CPU"
    if plan.training_seconds is None:
        return text
    cost = plan.cost_of(plan.training_seconds)
    text += f"; {span(duration, plan.training_seconds, longest)} for all steps"
    price = "at the profile's price_per_gpu_hour"
    return text if cost is None else f"{text}, which costs {span('{:,.2f}'.format, cost, longest)} {price}"


def _data(plan: RunPlan) -> str:
    data = plan.recipe.data
    state = "prepared" if plan.data.is_prepared else "to be prepared"
    if data.task is not None:
        state += f"; task {short_path(Path(data.task.file))}" + ("" if plan.data.is_prepared else ", not run yet")
    form = describe_detected(data) if isinstance(data.format, AutoFormat) else describe_format(data.format)
    return f"{form}; {state} in {short_path(plan.data.root)}"


def _documents(plan: RunPlan) -> Cell:
    found, length = plan.documents, f"{plan.recipe.training.sequence_length:,} tokens"
    if found is None:
        data = plan.recipe.data
        outcomes: dict[str, int] = {data.resolve_too_long(form): 0 for form in available_formats(data)}
        longer = f"; {describe_too_long(outcomes)}" if outcomes else ""
        return f"how many fit {length} is known once the data is prepared{longer}"
    total = f"{'' if found.is_complete else 'the first '}{plural(found.num_read, plan.recipe.training.sample_name)}"
    if found.num_fitting == found.num_read:
        longer = "" if found.is_complete else f"; {describe_too_long(found.too_long)}"
        return f"all of {total} fit {length} (the longest has {found.longest:,}){longer}"
    text = f"{found.num_fitting:,} of {total} fit {length} (the longest has {found.longest:,}); the others: "
    override = "; data.too_long or training.sequence_length changes that"
    return Styled(text + describe_too_long(found.too_long) + override, "yellow")


def _pictures(plan: RunPlan) -> Facts:
    vision, training = plan.recipe.model.architecture.vision, plan.recipe.training
    if vision is None:
        return []
    rate = training.vision_learning_rate
    own = "" if rate is None else f" at a learning rate of {rate:g}"
    parts = f"tower {count(vision.tower)} and projector {count(vision.projector)} parameters"
    sizes = "size not known"
    if vision.tokens:
        fitting = training.sequence_length // vision.tokens
        packs = f"at least {fitting:,} per pack" if fitting else "the largest does not fit a pack"
        sizes = f"up to {vision.tokens:,} tokens of {vision.patches:,} patches each, {packs}"
    return [("pictures", f"{sizes}; {vision.family}, {parts}, vision {training.vision}{own}")]


def _shares(plan: RunPlan) -> str:
    """Describe each source: its share of the tokens if the data is prepared, else what the recipe sets."""
    sources = plan.recipe.data.sources
    if plan.data.is_prepared:
        from ftkit.data.prepared_data import PreparedData

        counted = PreparedData(plan.data.root).read_manifest().sources
        total = max(1, sum(source.num_tokens for source in counted))
        return ", ".join(f"{source.name} {source.num_tokens / total:.1%}" for source in counted) + " of the tokens"
    weights = [source.weight for source in sources if not isinstance(source, GeneratedSource) and source.weight]
    shares = [f"{weight / sum(weights):.1%}" for weight in weights] or [
        "all rows" if source.num_train is None else plural(source.num_train, "row") for source in sources
    ]
    named = zip(plan.recipe.data.source_names, shares, strict=True)
    return ", ".join(f"{name} {share}" for name, share in named) + " of the rows" * bool(weights)
