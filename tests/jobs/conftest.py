"""Plans to render, and a machine on which rendered scripts run."""

from job_scripts import machine, make_plan

__all__ = ["machine", "make_plan"]
