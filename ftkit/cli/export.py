"""`ftkit export` and `ftkit verify`: export a checkpoint; verify an export, or an imported image."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from ftkit import process
from ftkit.cli import arguments
from ftkit.cli.commands import command, current_context
from ftkit.cli.forwarded import forwarded_command
from ftkit.cli.image_check import verify_image
from ftkit.cli.submit import submit_job
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.format import short_path
from ftkit.config.image_reference import parse_image
from ftkit.data.imports import import_transformers
from ftkit.errors import EXIT_CODES, FtkitError, NotFoundError, PrerequisiteError, TrainingError
from ftkit.evaluate.export_formats import COMPRESSED, Format, check_format, gguf_type, read_precision, write_gguf
from ftkit.files import read_json_if_valid, write_json
from ftkit.hub.push import check_hub_access, push_to_hub
from ftkit.launch.side_jobs import plan_verification
from ftkit.models.folder import EXPORT_RECORD, max_lora_rank
from ftkit.paths import is_path, neighbor_of
from ftkit.planning.plan import read_plan
from ftkit.runs.certificate import CERTIFICATE, EngineResult, make_certificate, require_certificate, settle_certificate
from ftkit.runs.find import list_runs
from ftkit.runs.signing import sign, signature_file
from ftkit.runs.storage import Store, push

if TYPE_CHECKING:
    from ftkit.config.training import Precision
    from ftkit.launch.render import SideJob
    from ftkit.planning.layout import RunLayout

_HUB = "hf://"
_ENGINES = ("auto", "transformers", "vllm", "sglang", "llama.cpp")


def _some_of(*choices: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return the callback of an option that takes some of the choices, separated by commas."""

    def read(context: click.Context, _: click.Parameter, value: str) -> list[str]:
        names = list(dict.fromkeys(value.split(",")))
        if wrong := [name for name in names if name not in choices]:
            raise click.BadParameter(f"expected some of {', '.join(choices)}, got {wrong[0]!r}", context)
        return names

    return read


@forwarded_command(
    "export",
    "ftkit export last",
    "ftkit export demo@best --dtype fp32",
    "ftkit export demo --step 10 --to ./my-model",
    "ftkit export demo --push ./copies/demo",
)
@click.argument("reference", metavar="RUN", shell_complete=arguments.complete_run_step)
@click.option(
    "--step", metavar="N|best|last", default="",
    help="Checkpoint: a step, 'best' (by evaluation.best, or validation loss), or 'last'; default: the best by "
    "evaluation.best if the recipe sets it or early stopping, else the newest.",
)  # fmt: skip
@click.option("--merge", "merges", is_flag=True, help="Merge adapters into the base model; QLoRA's is dequantized.")
@click.option(
    "--dtype", "precision", type=click.Choice(["bf16", "fp32"]), help="Dtype of the weights; default: that of training."
)
@click.option(
    "--format", "forms", metavar="NAMES", default="hf", show_default=True, callback=_some_of(*get_args(Format)),
    help="Some of hf, gguf, fp8, w4a16, vllm-lora, separated by commas. gguf: also write a GGUF file, with llama.cpp's "
    "own converter. fp8, w4a16: also a folder with the model quantized by llm-compressor, measured as with --quantize. "
    "vllm-lora: adapters; fails if vLLM does not load their kind.",
)  # fmt: skip
@click.option(
    "--quantize", "types", metavar="TYPE,...",
    help="With gguf: also quantized files, such as q4_k_m,q8_0, by llama.cpp's programs, and for each, on up to 100 "
    "validation rows, its loss, its KL divergence from the unquantized file, the recipe's metrics, and speed.",
)  # fmt: skip
@click.option(
    "--llm-compressor", "compressor", metavar="PYTHON",
    help="Python of the environment with llm-compressor; default: ftkit's own.",
)  # fmt: skip
@click.option(
    "--engine-python", "server", metavar="PYTHON",
    help="Python of an environment with vLLM, whose server measures fp8 and w4a16; default: transformers does.",
)  # fmt: skip
@arguments.folder_option(
    "--to", "folder", exists=False, is_resolved=True,
    about="Folder to write, in place of the run's earlier export with all files in it; default: in the run's folder.",
)  # fmt: skip
@click.option(
    "--push", "destination", metavar="hf://ORG/NAME|s3://…|gs://…|FOLDER",
    help="Copy the export there too. A new hub repository is private.",
)  # fmt: skip
@click.option(
    "--verify/--no-verify", "verifies", default=True,
    help="Verify the export (default). Where less than 4 bytes of memory per parameter are free, it takes longer.",
)  # fmt: skip
def export_command(  # noqa: PLR0913 - one for each option
    reference: str, *, step: str, merges: bool, precision: Precision | None, folder: Path | None, verifies: bool,
    destination: str | None, forms: list[Format], types: str | None, compressor: str | None, server: str | None,
) -> None:  # fmt: skip
    """Export the trained model of a run from one of its checkpoints, on a machine without GPUs.

    The folder has everything transformers or peft loads: weights, configuration, tokenizer, chat template, generation
    settings and a model card. It is renamed into place only after another process has loaded it and computed the same
    logits as the trained model. Prints the folder.

    {RUN} RUN@STEP selects a step as --step does.
    """
    terminal, (folder_of_run, typed) = Terminal(), arguments.get_run_step(reference)
    layout = folder_of_run.layout
    if typed and step:
        raise arguments.usage_error(f"'{reference}' and --step both select a step")
    if destination is not None:
        _check_destination(destination)
    _use_hub_cache()
    compressed = [form for form in forms if form in COMPRESSED]
    if compressed:
        os.environ.setdefault("TQDM_DISABLE", "1")  # compressed-tensors has a bar for each stage, and no option
    import_transformers()
    from ftkit.evaluate.checkpoint_export import ExportRequest, export_run

    quantizations = [] if types is None else list(dict.fromkeys(types.lower().split(",")))
    if quantizations and "gguf" not in forms:
        raise arguments.usage_error("--quantize is for --format gguf")
    if (compressor or server) and not compressed:
        raise arguments.usage_error("--llm-compressor and --engine-python are for --format fp8 and w4a16")
    plan, pythons = read_plan(layout), (compressor or sys.executable, server)
    for form in forms:
        check_format(form, plan, quantizations, pythons, merges=merges)

    verify = (lambda made: terminal.say(_verify_in_process(made))) if verifies else None
    exported = export_run(layout, ExportRequest(step or typed, merges, precision, folder), verify, terminal.say)
    try:
        with _keeping(exported, "but not all that --format asks for"):
            _add_formats(forms, exported, quantizations, pythons, layout, terminal)
    finally:
        settle_certificate(exported)
    terminal.data(f"{exported}\n")
    if destination is not None:
        terminal.data(f"{_push(exported, destination, terminal)}\n")


def _add_formats(
    forms: Sequence[Format], exported: Path, types: Sequence[str], pythons: tuple[str, str | None], layout: RunLayout,
    terminal: Terminal,
) -> None:  # fmt: skip
    if "vllm-lora" in forms:
        terminal.say(f"serve them with: vllm serve BASE --enable-lora --max-lora-rank {max_lora_rank(exported)}")
    precision, compressed = read_precision(exported), [form for form in forms if form in COMPRESSED]
    file = exported / f"{layout.root.name}-{precision}.gguf"
    if "gguf" in forms:
        for warning in write_gguf(exported, file, precision, terminal.say):
            terminal.warn(warning)
    if not types and not compressed:
        return
    from ftkit.evaluate.quantized import Compressed, Gguf, write_quantized

    plan, show = read_plan(layout), partial(terminal.table, is_data=False)
    if types:
        others = [name for name in types if name != gguf_type(precision)]  # the file has that type
        write_quantized(Gguf(exported, file, plan, terminal.say), others, show)
    if compressed:
        write_quantized(Compressed(exported, plan, terminal.say, *pythons), compressed, show)


def _check_destination(destination: str) -> None:
    if destination.startswith(_HUB):
        check_hub_access(destination)
    elif destination.partition("://")[0] in ("s3", "gs") or is_path(destination):
        Store(destination).check_writable()
    else:
        raise arguments.usage_error(
            f"--push: expected hf://ORG/NAME, s3://…, gs://… or a folder (./copy), got '{destination}'"
        )


@contextmanager
def _keeping(exported: Path, lacks: str, fix: str = "") -> Iterator[None]:
    """Add to an error where the export is and which step is missing (`lacks`)."""
    try:
        yield
    except FtkitError as error:
        what = f"the export is in {exported}, {lacks}: {error.what}"
        raise type(error)(what, meaning=error.meaning, fix=error.fix or fix) from error


def _push(exported: Path, destination: str, terminal: Terminal) -> str:
    fix = "repeat the command: existing files are not copied again"
    with _keeping(exported, f"but not in {destination}", fix):
        if destination.startswith(_HUB):
            return push_to_hub(exported, destination, terminal.say)
        push(exported, destination, EXPORT_RECORD, terminal.say)
    return destination


def _use_hub_cache() -> None:
    """Look for base models in the jobs' cache, unless HF_HOME is set."""
    os.environ.setdefault("HF_HOME", str(arguments.current_workspace().hub_home))


def _verify_in_process(folder: Path) -> str:
    done = process.run_stoppable([sys.executable, "-m", "ftkit", "verify", str(folder)], timeout_seconds=24 * 3600.0)
    if done.returncode == -signal.SIGKILL:
        raise TrainingError(
            "the process that verified the export was killed, and the export was removed",
            meaning="usually the machine ran out of memory: other programs took it while the check ran",
            fix="export on a machine with more memory, or without the check: --no-verify",
        )
    if done.returncode:
        what = done.stderr.strip() or EXIT_CODES.get(done.returncode, f"it ended with status {done.returncode}")
        raise TrainingError(
            f"the export did not match the trained model and was removed\n{what}",
            fix="if rounding causes the difference: --dtype fp32",
        )
    return done.stdout.rstrip()


@command(
    "verify",
    "ftkit verify olmo3:25.02",
    "ftkit verify /shared/images/olmo3+25.02.sqsh --deep",
    "ftkit verify ./my-model",
)
@click.argument("wanted", metavar="NAME:TAG|FILE|URI|DIR", shell_complete=arguments.complete_image)
@click.option("--deep", is_flag=True, help="An image: also run the self-check inside it.")
@click.argument("words", metavar="[-- ARGUMENT...]", nargs=-1, type=click.UNPROCESSED)
@arguments.require_signature_option("a file, or an export's certificate,")
@click.option(
    "--engine", "engines", metavar="NAMES", default="auto", callback=_some_of(*_ENGINES),
    help="An export: also serve it with these, separated by commas: vllm, sglang, llama.cpp. auto, the default, serves "
    "it with vllm on GPUs where that is installed; transformers, with none.",
)  # fmt: skip
@click.option(
    "--engine-python", "python", metavar="PYTHON", default=sys.executable,
    help="Python of the environment with vLLM or SGLang; default: ftkit's own.",
)  # fmt: skip
@arguments.folder_option(
    "--llama-cpp", is_resolved=True,
    about="Checkout of llama.cpp, built in its folder build; default: that of FTKIT_GGUF_CONVERTER, or PATH.",
)  # fmt: skip
@click.option(
    "--url", default="", metavar="http://HOST:PORT", help="Server of --engine that has the export; default: start one."
)
@click.option(
    "--as-job", is_flag=True, help="Verify in a Slurm job: vLLM's server in the serving image, ftkit in the run's."
)
@arguments.image_option("Serving image, for --as-job; default: vllm:0.33.")
@arguments.number_option("--gpus", "num_gpus", about="GPUs of --as-job; default: as many as the weights need.")
@arguments.time_option("the profile's, for --as-job")
@arguments.dry_run_option("the script of --as-job")
@arguments.file_option(
    "--output", "-o", exists=False, about="File of the certificate; default: certificate.json in DIR."
)
@arguments.signing_options("the signature is a file next to the certificate.")
@arguments.json_option
def verify_command(  # noqa: PLR0913 - one for each option
    wanted: str, words: tuple[str, ...], *, deep: bool, public_key: Path | None, engines: list[str], python: str,
    llama_cpp: Path | None, output: Path | None, signs: bool, key: Path | None, as_json: bool, url: str, as_job: bool,
    image: str | None, num_gpus: int | None, time_limit: str | None, dry_run: bool,
) -> None:  # fmt: skip
    """Verify an imported image, or DIR, an export. Lists every difference.

    Of an image, the digests are computed again and compared with its manifest (exit code 10). An export is loaded with
    transformers (and peft), and compared with the record that 'ftkit export' wrote: its logits equal the trained
    model's and differ from the base model's, generation stops at each end token, and the chat template renders as in
    training (exit code 9). Then each engine's own server serves it, with the arguments after --, and is compared too;
    certificate.json has the result.
    """
    of_job = image or num_gpus or time_limit or dry_run
    if as_job:
        other_engine = engines not in (["vllm"], ["auto"]) or llama_cpp or url or python != sys.executable
        if other_engine or deep or signs or as_json or public_key or output:
            raise arguments.usage_error("--as-job is for --engine vllm; other options than its own are not for jobs")
        wish = partial(plan_verification, num_gpus=num_gpus, time_limit=time_limit, words=words)
        _submit_verification(Path(wanted).resolve(), image, wish, dry_run=dry_run)
    elif Path(wanted).is_dir():
        if deep or of_job:
            raise arguments.usage_error("--deep is for an image; --image, --gpus, --time and --dry-run for --as-job")
        private_key = arguments.signing_key(signs=signs, key=key)
        if public_key:
            engines_of_it = ", ".join(require_certificate(Path(wanted), public_key))
            Terminal().say(Styled(f"the certificate of {engines_of_it} is signed by {short_path(public_key)}", "green"))
        serving = (words, python, llama_cpp, url)
        _verify_export(Path(wanted).resolve(), engines, serving, output, private_key, as_json=as_json)
    elif any(wanted in (run.id, run.name) for run in list_runs(arguments.current_workspace())):
        raise NotFoundError(f"{wanted} is a run, not an export", fix=f"ftkit export {wanted}: it also verifies")
    elif (Path(wanted).exists() or "/" in wanted) and (Path(wanted).parent / EXPORT_RECORD).is_file():
        raise arguments.usage_error(f"an export is verified as a whole: ftkit verify {Path(wanted).parent}")
    elif is_path(wanted) and not Path(wanted).expanduser().exists():
        fix = f"{neighbor_of(Path(wanted))}give an export's folder, or an imported image"
        raise NotFoundError(f"there is no file or folder {wanted}", fix=fix)
    else:
        if words or output or signs or key or llama_cpp or url or of_job or engines != ["auto"]:
            raise arguments.usage_error("engines, --output, --sign, and jobs are for DIR, an export")
        verify_image(wanted, public_key, deep=deep, as_json=as_json)


def _submit_verification(folder: Path, image: str | None, wish: Callable[..., SideJob], *, dry_run: bool) -> None:
    terminal, ctx = Terminal(), current_context()
    run = (read_json_if_valid(folder / EXPORT_RECORD, dict[str, object]) or {}).get("run")
    if not isinstance(run, str):
        raise NotFoundError(f"{folder} is no export of ftkit", fix="export a run: ftkit export RUN")
    chosen = parse_image(image, ctx.project, "command line", "--image") if image else None
    job = wish(read_plan(arguments.get_run(run).layout), chosen, folder, ctx)
    if job_id := submit_job(job, terminal, dry_run=dry_run):
        terminal.say(f"job {job_id} verifies {folder}; its log: {short_path(job.log)}")
        terminal.data(f"{job_id}\n")


def _verify_export(
    folder: Path, engines: list[str], serving: tuple[tuple[str, ...], str, Path | None, str], output: Path | None,
    key: Path | None, *, as_json: bool,
) -> None:  # fmt: skip
    _use_hub_cache()
    import_transformers()
    from transformers.utils import logging

    from ftkit.evaluate.certificate import certify, chosen_engines, held_out
    from ftkit.evaluate.verify_export import read_record, require_passed, verify_export

    logging.disable_progress_bar()
    terminal, record, path = Terminal(), read_record(folder), output or folder / CERTIFICATE
    names = chosen_engines(engines, folder)
    if (serving[0] or serving[-1]) and len(names) != 1:
        raise arguments.usage_error("--url and arguments after -- are for one engine: --engine NAME")
    if (names or output or key) and not os.access(path.parent, os.W_OK):
        raise PrerequisiteError(f"can't write {path}", fix="write the certificate elsewhere: --output FILE")
    checks = verify_export(folder, terminal.say)
    results = [EngineResult("transformers", version("transformers"), "fp32", (), tuple(checks))]
    if results[0].passed:
        runs = list_runs(arguments.current_workspace()) if names else []
        rows = next((held_out(read_plan(run.layout)) for run in runs if run.id == record.run), {})
        results += [certify(name, folder, record, terminal.say, *serving, rows) for name in names]
    if names or output or key:
        signature_file(path).unlink(missing_ok=True)
        write_json(path, make_certificate(folder, record.run, record.step, record.kind, results))
        terminal.say(f"certificate: {short_path(path)}")
    if key:
        terminal.say(f"signed: {short_path(sign(path, key, 'ftkit-certificate').absolute())}")
    checks += [replace(each, name=f"{result.engine}: {each.name}") for result in results[1:] for each in result.checks]
    if as_json:
        terminal.json([asdict(check) for check in checks])
    else:
        facts = [(check.name, check.found if check.passed else Styled(check.found, "red")) for check in checks]
        terminal.facts(facts, is_data=True)
    require_passed(folder, checks)
