"""Which parameters a sync must contain: all of the model, but one of several tied names, and no tower without any."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from inference_server.engine import worker as worker_module
from inference_server.engine.weight_loader import Reload
from inference_server.engine.worker import PushWorker
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


def test_a_worker_loads_into_the_model_and_not_into_vllms_wrapper_for_cuda_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of vLLM's runners for GPUs keeps the wrapper as `model`. Its type is that of no model, such as gpt-oss."""
    model, seen, order = Model(), list[object](), cast(Any, None)
    worker: Any = PushWorker()
    worker.device, worker.vllm_config = torch.device("cpu"), SimpleNamespace(model_config=None)
    worker.model_runner = SimpleNamespace(model="a wrapper", get_model=lambda: model)
    full = SimpleNamespace(is_adapter_alone=False, adapter_names=())
    worker.receiver = SimpleNamespace(
        carried_by=lambda order: full, successor=lambda order: None, buckets=lambda order: ()
    )

    class Recorded:
        can_be_made = staticmethod(lambda model: seen.append(model) or True)

        def __init__(self, model: object, *_: object) -> None:
            seen.append(model)

        def finish(self) -> None: ...

    monkeypatch.setattr(worker_module, "Reload", Recorded)
    monkeypatch.setattr(worker_module, "NextWeights", Recorded)
    monkeypatch.setattr(worker_module, "put_back", Recorded)
    monkeypatch.setattr(worker_module, "set_current_vllm_config", lambda config: nullcontext())
    monkeypatch.setattr(
        worker_module.adapter_loader, "without_adapters", lambda model: seen.append(model) or nullcontext()
    )
    monkeypatch.setattr(worker, "_apply", lambda *_: None)
    assert worker._successor(order) is not None
    worker._load(order)
    assert str(worker._put_back(PushIncomplete("torn"))) == "torn"
    assert len(seen) == 7 and all(one is model for one in seen)
