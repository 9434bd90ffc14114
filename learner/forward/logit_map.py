"""What a model does to the output of its head, found out by putting known numbers there: no config key is read.

Between the model and tile.py, which does the same to tiles of logits. Invariant: a model that does anything else is refused.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from learner.forward.pack import pack
from learner.forward.tile import LogitMap
from learner.forward.trunk import run_model
from protocol.errors import ConfigError

LARGE, SMALL = 2.0**23, 2.0**-20
"""Far above every soft cap, and where none bends the line; no rounding in any dtype."""


@torch.no_grad()
def logit_map_of(model: Any) -> LogitMap:
    """Raises ConfigError for a map that is neither a scaling nor a soft cap. All ranks call it if the model is sharded."""
    known_V = torch.linspace(-100.0, 100.0, model.get_input_embeddings().num_embeddings, dtype=torch.float64)
    known_V[:2] = torch.tensor([LARGE, SMALL])
    known_V = known_V.to(model.device)

    def replace(_head: nn.Module, _inputs: object, logits: torch.Tensor) -> torch.Tensor:
        return known_V.expand(*logits.shape[:-1], len(known_V))  # float64 in any case: the scale comes out exactly

    hook = model.get_output_embeddings().register_forward_hook(replace)
    try:
        one_token = pack([(np.zeros(1, np.int64), [np.zeros(1, np.int64)])], model.device)
        found_V = run_model(model, model, one_token).logits[0, 0].double()
    finally:
        hook.remove()
    scale = float(found_V[1] / SMALL)
    cap = None if float(found_V[0]) > 0.01 * LARGE * scale else float(found_V[0])
    expected_V = known_V * scale
    expected_V = expected_V if cap is None else cap * torch.tanh(expected_V / cap)
    if not torch.allclose(found_V, expected_V, rtol=1e-5, atol=1e-5):
        raise ConfigError(
            f"model: {type(model).__name__} does to its logits neither a scaling nor a soft cap (of {LARGE:g} it makes "
            f"{float(found_V[0]):g}, of {SMALL:g} {float(found_V[1]):g}), so the learner cannot compute them; take another model"
        )
    return LogitMap(scale, cap)
