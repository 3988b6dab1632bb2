"""Arguments and options that the image commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import current_workspace
from ftkit.cli.commands import current_context
from ftkit.cli.shell_completion import complete_image
from ftkit.errors import ConfigError, Problem

if TYPE_CHECKING:
    from ftkit.images.store import ImageStore
    from ftkit.planning.layout import Workspace

image_argument = click.argument("reference", metavar="NAME:TAG", shell_complete=complete_image)
registry_option = click.option(
    "--registry",
    metavar="HOST[/PATH]",
    help="Registry to push to and import from; default: 'registry:' in ftkit.yaml. [env var: FTKIT_REGISTRY]",
)


def image_store(workspace: Workspace | None = None) -> ImageStore:
    """Return the folder of imported images."""
    from ftkit.images.store import ImageStore

    return ImageStore((workspace or current_workspace()).images)


def registry_of(option: str | None) -> str | None:
    """Return the registry of the command line, else of the settings."""
    from ftkit.config.request import load_settings

    return option or load_settings(current_context()).settings.registry


def required_registry(option: str | None, reference: str) -> str:
    """Return the registry to push an image to.

    Raises:
        ConfigError: neither the command line nor a file sets one.
    """
    registry = registry_of(option)
    if not registry:
        user = current_context().user / "config.yaml"
        raise ConfigError(
            [Problem("", "registry", f"no registry is set to push {reference} to.",
                     f"Give --registry HOST/PATH (such as ghcr.io/you), or set 'registry: HOST/PATH' in ftkit.yaml "
                     f"or {user}. If the cluster's workspace is mounted on this machine, you need no registry: "
                     f"ftkit import {reference}")]
        )  # fmt: skip
    return registry
