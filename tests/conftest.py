"""How tests run: none depends on the clock or on how pytest was started, and a CI job that was green stays green."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("here", UNTIMED)
settings.register_profile("repeatable", UNTIMED, derandomize=True)
settings.load_profile("repeatable" if os.environ.get("CI") else "here")

# Programs that a shell starts in the background ignore SIGINT, and so do those that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
