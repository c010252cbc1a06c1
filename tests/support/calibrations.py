"""Calibrations of `tc4` that belong to no model."""

from __future__ import annotations

import numpy as np

from kv_transfer.codecs.calibration import Calibration


def random_calibration(
    *, layers: int, heads: int, head_dim: int, width: int, step: float, seed: int = 0, model_digest: str = "model"
) -> Calibration:
    """Random means and orthonormal directions; the same step everywhere."""
    draw = np.random.default_rng(seed)
    groups = heads * head_dim // width
    basis, _ = np.linalg.qr(draw.normal(size=(layers, 2, groups, width, width)))
    return Calibration(
        model_digest=model_digest,
        head_dim=head_dim,
        mean=draw.normal(size=(layers, 2, groups, width)).astype(np.float32),
        basis=np.ascontiguousarray(basis, np.float32),
        step=np.full((layers, 2), step, np.float32),
        inverse_frequencies=10000.0 ** (-2 * np.arange(head_dim // 2) / head_dim),
    )
