"""The loss of an exported model on a run's validation split."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ftkit.data.packing import IGNORED
from ftkit.data.prepared_data import PreparedData


def validation_loss(model: Any, run: Any) -> float:
    """Return the mean loss over the targets."""
    store = PreparedData(run.plan.data.root).read_validation()
    total = 0.0
    for tokens, labels, positions, _ in torch.from_numpy(store.read(range(len(store))).astype(np.int64)):
        with torch.no_grad():
            logits = model(tokens[None], position_ids=positions[None], use_cache=False).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
    return total / float(store.num_targets.sum())
