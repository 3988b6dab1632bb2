"""From a plan to a job: run folders, schedulers, states, and finding runs again."""
