"""Check once, on the loaded policy, that its routers can replay the server's choices.

    a pass as it is ─▶ one choice of experts in some layers      the same choices, replayed ─▶ equal logprobs
                                                                 other choices, replayed    ─▶ other logprobs

Invariant: no family is trusted by its name. One whose routers do not choose by torch.topk is refused.
"""

from collections import Counter
from typing import Any

import torch

from learner.forward.attention import layers_of
from learner.forward.logprobs import token_logprobs
from learner.forward.pack import Pack
from learner.forward.packing_check import FEW_ULP
from learner.forward.probe import probe_of
from learner.forward.replay import OWN, Routers, Routing, routed_by, routers
from protocol.errors import ConfigError
from protocol.messages import RoutingShape


@torch.no_grad()
def find_routers(model: Any, shape: RoutingShape) -> None:
    """Find the layers with a router, so that later passes can replay. All ranks call this together.

    Raises:
        ConfigError: The routers of this model cannot replay.
    """
    pack = probe_of(model)
    counts: Counter[int] = Counter()
    known = Routers(shape, frozenset())

    def count(layer: int, scores: torch.Tensor, own: Any) -> Any:
        if known.is_choice(scores, own.indices):
            counts[layer] += 1
        return own

    with routed_by(layers_of(model), count):
        expected_BT, _ = token_logprobs(model, pack, 1.0)
    if problem := _problem(model, shape, counts):
        raise ConfigError(
            f"learner.routing_replay = true is not supported for {type(model).__name__}: {problem}; set it to false"
        )
    routers[model] = Routers(shape, frozenset(counts))
    own_BT, _ = token_logprobs(model, pack, 1.0, routing=_routing(pack, shape, are_own=True))
    other_BT, _ = token_logprobs(model, pack, 1.0, routing=_routing(pack, shape, are_own=False))
    as_own, as_other = (float((found_BT - expected_BT).abs().mean()) for found_BT in (own_BT, other_BT))
    if not as_own <= FEW_ULP or not as_other > FEW_ULP:
        raise ConfigError(
            f"learner.routing_replay = true is not supported for {type(model).__name__}: its own choices change its "
            f"logprobs by {as_own:.2g} (expected 0), and other choices by {as_other:.2g}; set it to false"
        )


def _problem(model: Any, shape: RoutingShape, counts: Counter[int]) -> str | None:
    num_layers = len(layers_of(model))
    if num_layers != shape.num_layers:
        return f"{num_layers} layers were found, expected {shape.num_layers}"
    if not counts:
        return f"no layer chooses {shape.num_per_token} of {shape.num_experts} experts by torch.topk"
    several = [layer for layer, count in counts.items() if count > 1]
    return f"layers {several} choose more than once" if several else None


def _routing(pack: Pack, shape: RoutingShape, *, are_own: bool) -> Routing:
    """Return a routing that leaves each choice to the model's own router, or one of random choices."""
    size = (pack.num_tokens, shape.num_layers, shape.num_per_token)
    if are_own:
        experts_NLK = torch.full(size, OWN, dtype=torch.int16)
    else:
        order = torch.rand((*size[:2], shape.num_experts), generator=torch.Generator().manual_seed(0)).argsort(-1)
        experts_NLK = order[..., : shape.num_per_token].to(torch.int16)
    return Routing(experts_NLK=experts_NLK)
