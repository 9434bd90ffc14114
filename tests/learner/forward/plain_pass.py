"""Tiny models, and the plain padded pass of transformers over the same groups."""

from typing import Any

import numpy as np
import torch
import transformers

from learner.forward.logprobs import token_logprobs
from learner.forward.pack import Pack
from tests.zoo.families import LM

CPU = torch.device("cpu")
TEMPERATURE = 0.7
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}

Groups = list[tuple[np.ndarray, list[np.ndarray]]]
Gradients = dict[str, torch.Tensor]


def tiny(name: str, keys: dict[str, Any] | None = None) -> Any:
    """Return a random model of two layers in which every weight matters."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**LM | (keys or {})))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def make_groups() -> Groups:
    """Return prompts of 1 to 40 tokens and completions of 1 to 30, below and above a window of 8."""
    rng = np.random.default_rng(0)
    shapes = [(5, (1, 7, 3)), (1, (4, 4)), (13, (30, 2, 12, 12)), (40, (1, 9, 18)), (13, (6,)), (8, (1, 1))]
    return [(rng.integers(1, 16, p), [rng.integers(1, 16, c) for c in lengths]) for p, lengths in shapes]


def plain(model: Any, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprobs and entropies of all completions, from right-padded rows, a mask and all logits."""
    rows = [(prompt, completion) for prompt, completions in groups for completion in completions]
    longest = max(len(prompt) + len(completion) for prompt, completion in rows)
    token_ids_BS, mask_BS = torch.zeros(2, len(rows), longest, dtype=torch.long)
    for b, (prompt, completion) in enumerate(rows):
        ids = torch.from_numpy(np.concatenate([prompt, completion]))
        token_ids_BS[b, : len(ids)], mask_BS[b, : len(ids)] = ids, 1
    logits_BSV = model(token_ids_BS, attention_mask=mask_BS, use_cache=False).logits.float() / TEMPERATURE
    logprobs_BSV = logits_BSV.log_softmax(-1)
    logprobs, entropies = [], []
    for b, (prompt, completion) in enumerate(rows):
        here_TV = logprobs_BSV[b, len(prompt) - 1 : len(prompt) + len(completion) - 1]
        logprobs.append(here_TV.gather(1, torch.from_numpy(completion)[:, None])[:, 0])
        entropies.append(-(here_TV.exp() * here_TV).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def loss_of(logprobs_M: torch.Tensor, entropy_M: torch.Tensor) -> torch.Tensor:
    use_M = torch.linspace(-1, 1, len(logprobs_M))
    return (use_M * (logprobs_M - logprobs_M.detach()).exp() * 10).sum() - 0.1 * entropy_M.sum() - logprobs_M.sum()


def gradients(model: Any, loss: torch.Tensor) -> Gradients:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def pass_over(model: Any, batch: Pack) -> tuple[torch.Tensor, torch.Tensor, float, Gradients]:
    """Return logprobs, entropies, loss and gradients of the learner's pass."""
    logprobs_BT, entropy_BT = token_logprobs(model, batch, TEMPERATURE, entropy="gradient")
    assert entropy_BT is not None
    logprobs_M, entropy_M = logprobs_BT[batch.is_token_BT], entropy_BT[batch.is_token_BT]
    loss = loss_of(logprobs_M, entropy_M)
    return logprobs_M.detach(), entropy_M.detach(), float(loss.detach()), gradients(model, loss)


def assert_same(found_loss: float, found: Gradients, loss: float, right: Gradients) -> None:
    assert abs(found_loss - loss) <= 1e-6 * abs(loss) and found.keys() == right.keys()
    norm = sum(float(gradient.square().sum()) for gradient in right.values()) ** 0.5
    assert sum(float((found[n] - right[n]).square().sum()) for n in right) ** 0.5 <= 1e-5 * norm
