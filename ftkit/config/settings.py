"""Settings: what a user or a project would otherwise type each time."""

from __future__ import annotations

from ftkit.config.strict import Name, Spec


class Settings(Spec):
    """The keys of `ftkit.yaml`, of the user's `config.yaml`, and of `FTKIT_*` variables."""

    cluster: Name = "local"
    """Cluster to run on when `--cluster` is not given."""
    image: str | None = None
    """Image to run in when `--image` is not given."""
    workspace: str = "."
    """Folder that holds `runs/`, `data/` and `images/`; on a cluster, on its shared file system."""
    registry: str | None = None
    """Registry that `ftkit push` pushes to and `ftkit import` imports from: `HOST` or `HOST/PATH`."""
