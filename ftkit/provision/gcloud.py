"""Checks and error patterns that all clusters on Google Cloud share."""

from __future__ import annotations

from ftkit.provision.steps import Check

ACCOUNT_CHECK = Check(
    "a Google Cloud account is active",
    ("gcloud", "auth", "list", "--filter=status:ACTIVE", "--format=value(account)"),
    "log in with: gcloud auth login",
    lambda output: None if output.strip() else "none is",
)
OUT_OF_STOCK = "ZONE_RESOURCE_POOL_EXHAUSTED|does not have enough resources"
OUT_OF_QUOTA = "Quota .* exceeded|QUOTA_EXCEEDED"
"""Patterns in the output of failed commands."""
