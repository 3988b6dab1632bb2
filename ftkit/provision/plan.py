"""Turn a cluster's settings into the steps that create it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftkit.config.layers import COMMAND_LINE
from ftkit.errors import ConfigError, Problem
from ftkit.provision.gcp_slurm import plan_gcp_slurm
from ftkit.provision.gcp_vm import plan_gcp_vm
from ftkit.provision.soperator import plan_soperator
from ftkit.provision.spec import GcpSlurmSpec, GcpVmSpec, SoperatorSpec

if TYPE_CHECKING:
    from ftkit.provision.spec import AnySpec, GcpSlurmKind, Kind
    from ftkit.provision.steps import Provision

_NAME = re.compile(r"[a-z][a-z0-9]{1,19}")


def plan_provision(name: str, kind: Kind, spec: AnySpec) -> Provision:
    """Return the steps that create a cluster.

    Raises:
        ConfigError: the name is not valid for all providers.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            [Problem(COMMAND_LINE, "NAME", f"'{name}' can't be a cluster's name.",
                     "Use 2 to 20 lowercase letters and digits, a letter first.")]
        )  # fmt: skip
    match spec:
        case GcpVmSpec():
            return plan_gcp_vm(name, spec)
        case SoperatorSpec():
            return plan_soperator(name, spec)
        case GcpSlurmSpec():
            slurm_kind: GcpSlurmKind = kind  # type: ignore[assignment] # only these kinds have this spec
            return plan_gcp_slurm(name, slurm_kind, spec)
