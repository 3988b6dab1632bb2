"""Let PyPI's torchvision be imported with a torch for CPUs: it needs the names of two operators of its library."""

import torch

if torch.version.cuda is None:
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
