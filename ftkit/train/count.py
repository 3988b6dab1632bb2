"""`python -m ftkit.train.count JSON`: count a model's parameters for a plan, which does not import torch."""

from __future__ import annotations

import sys

from ftkit.data.imports import import_transformers


def main() -> None:
    """Print the counts of the model in the first argument."""
    import_transformers()
    from ftkit.train.param_count import print_counts  # noqa: PLC0415 - its imports can fail beside broken packages

    print_counts(sys.argv[1])


if __name__ == "__main__":
    main()
