"""The groups of commands: `ftkit runs`, `images`, `data`, `config` and `cluster`."""

from __future__ import annotations

from ftkit.cli.commands import LazyCommand, LazyGroup

runs_command = LazyGroup(
    "runs",
    default="list",
    sections={
        "Commands": (
            LazyCommand("list", "ftkit.cli.runs", "List runs, newest first (the default)."),
            LazyCommand("checkpoints", "ftkit.cli.run_files", "List the checkpoints of a run, and verify them."),
            LazyCommand("top", "ftkit.cli.runs", "Show the load of all GPUs of a run."),
            LazyCommand("sync", "ftkit.cli.run_files", "Copy a run to an object store or a folder."),
            LazyCommand("bundle", "ftkit.cli.run_files", "Put a run's manifest, metrics, and report into one file."),
        )
    },
    examples=("ftkit runs", "ftkit runs --json | jq -r '.[0].id'", "ftkit runs checkpoints last --verify"),
    help="List the runs of the workspace; show checkpoints and GPUs of a run, or copy it.",
)
images_command = LazyGroup(
    "images",
    default="list",
    sections={
        "Commands": (
            LazyCommand("list", "ftkit.cli.images", "List images and where each one is (the default)."),
            LazyCommand("lock", "ftkit.cli.images", "Pin an image's packages, with hashes."),
            LazyCommand("definition", "ftkit.cli.images", "Print an image's Singularity definition file."),
        )
    },
    examples=("ftkit images", "ftkit images lock olmo3:25.02"),
    help="List images and where each one is, pin their packages, or print a definition file.",
)
data_command = LazyGroup(
    "data",
    sections={
        "Commands": (
            LazyCommand("show", "ftkit.cli.data", "Print samples as the trainer sees them."),
            LazyCommand("stats", "ftkit.cli.data", "Count tokens, lengths, duplicates and packs."),
            LazyCommand("check", "ftkit.cli.data", "Check every row."),
            LazyCommand("prepare", "ftkit.cli.data", "Tokenize and pack data, and download weights."),
            LazyCommand("upload", "ftkit.cli.data", "Copy data to an object store."),
        )
    },
    examples=("ftkit data show demo", "ftkit data stats demo", "ftkit data check demo --json"),
    help="""Inspect and check training data. Needs no GPU.

    Each command takes the arguments of 'ftkit run': a recipe, and overrides of its keys.
    """,
)
config_command = LazyGroup(
    "config",
    default="show",
    sections={
        "Commands": (
            LazyCommand("show", "ftkit.cli.config", "Show settings and where each one is set (the default)."),
            LazyCommand("recipes", "ftkit.cli.config", "List recipes (model, data, training)."),
            LazyCommand("schema", "ftkit.cli.config", "Print a JSON schema for editors."),
            LazyCommand("completion", "ftkit.cli.config", "Print the shell completion script."),
        )
    },
    examples=("ftkit config", "ftkit config recipes", 'eval "$(ftkit config completion bash)"'),
    help="Show settings and recipes; print JSON schemas for editors, and completion for shells.",
)
cluster_command = LazyGroup(
    "cluster",
    default="list",
    sections={
        "Profiles": (
            LazyCommand("list", "ftkit.cli.cluster", "List cluster profiles (the default)."),
            LazyCommand("connect", "ftkit.cli.cluster", "Install this ftkit on a cluster's login node."),
        ),
        "Create": (
            LazyCommand("create", "ftkit.cli.cluster", "Create a cluster, or a VM with a GPU."),
            LazyCommand("status", "ftkit.cli.cluster", "Show what was created."),
            LazyCommand("destroy", "ftkit.cli.cluster", "Remove what was created."),
        ),
    },
    examples=("ftkit cluster", "ftkit cluster connect --help", "ftkit cluster create --help"),
    help="""List cluster profiles, use a cluster from this machine, or create one with its provider's own tools.

    A profile with 'login: user@host' is reached with the system's ssh: its configuration, agent, and jump hosts apply.
    'ftkit run' sends the recipe, local data, and the project's settings there, and submits the run there; the commands
    for runs (status, logs, cancel, resume, chat, ...) run there as if they ran here. The cluster comes from --cluster,
    FTKIT_CLUSTER, or ftkit.yaml; runs that were submitted from here are found by name.

    'create' and 'destroy' show every file and command with --dry-run. Created resources are recorded, so an interrupted
    command continues, and 'destroy' removes exactly those.
    """,
)
