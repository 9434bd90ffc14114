"""Which parameters a sync must contain: all of the model, but one of several tied names, and no tower without any."""

from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import nn

from inference_server.engine.weight_loader import Reload
from protocol.errors import PushIncomplete


class Model(nn.Module):
    """A multimodal model of vLLM's kind: it names its towers, and reports what it has loaded."""

    _tower_model_names = ("vision",)

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.layers = nn.Linear(2, 2), nn.Linear(2, 2)
        self.embedding, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return {name for name, _ in weights}


LANGUAGE = ("layers.weight", "layers.bias")


def load(names: Sequence[str]) -> None:
    reload = Reload(Model(), None, torch.device("cpu"))  # type: ignore[arg-type]
    reload.load((name, torch.zeros(2, 2)) for name in names)
    reload.finish()


@pytest.mark.parametrize("tied", ["embedding.weight", "head.weight"])
def test_a_sync_of_the_language_model_is_complete_with_one_of_two_tied_names(tied: str) -> None:
    load([*LANGUAGE, tied])
    load([*LANGUAGE, tied, "vision.weight", "vision.bias"])


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (LANGUAGE, "embedding.weight"),
        (["layers.weight", "head.weight"], "layers.bias"),
        ([*LANGUAGE, "head.weight", "vision.weight"], "vision.bias"),
    ],
)
def test_a_sync_without_another_parameter_names_it(names: Sequence[str], missing: str) -> None:
    with pytest.raises(PushIncomplete, match=missing):
        load(names)
