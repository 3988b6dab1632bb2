"""What the commands on images share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ftkit.cli.arguments import current_workspace
from ftkit.cli.shell_completion import complete_image
from ftkit.config.context import Context
from ftkit.config.settings import load_settings
from ftkit.errors import ConfigError, Problem
from ftkit.images.store import ImageStore

if TYPE_CHECKING:
    from ftkit.planning.layout import Workspace

image_argument = click.argument("reference", metavar="NAME:TAG", shell_complete=complete_image)
registry_option = click.option(
    "--registry", metavar="HOST[/PATH]", help="Registry to push to and import from; 'registry:' in ftkit.yaml."
)


def image_store(workspace: Workspace | None = None) -> ImageStore:
    """Return the folder of imported images."""
    return ImageStore((workspace or current_workspace()).images)


def registry_of(option: str | None) -> str | None:
    """Return the registry that was typed, or that the settings name."""
    return option or load_settings(Context.here()).settings.registry


def required_registry(option: str | None, reference: str) -> str:
    """Return the registry that an image is pushed to.

    Raises:
        ConfigError: neither the command line nor a file names one.
    """
    registry = registry_of(option)
    if not registry:
        user = Context.here().user / "config.yaml"
        raise ConfigError(
            [Problem("", "registry", f"nothing says which registry {reference} is to be pushed to.",
                     f"Give --registry HOST/PATH (such as ghcr.io/you), or write 'registry: HOST/PATH' into ftkit.yaml "
                     f"or {user}. No registry is needed where this machine sees the cluster's workspace: "
                     f"ftkit import {reference}")]
        )  # fmt: skip
    return registry
