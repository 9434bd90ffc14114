"""Weight-only int8 for linear layers on a CPU, as a quantization method of vLLM.

    weights of the model files, or of a weight sync ─▶ a whole layer ─▶ int8 values and a scale per output ─▶ apply

vLLM's own int8 method quantizes experts only and leaves every other layer as it is. This one works as vLLM's
online fp8 methods on GPUs do: weights are declared on the meta device, and vLLM quantizes each layer as soon as
its weights are complete, at the start and at each reload.
Invariant: equal weights give equal tensors, whether loaded first or by a sync.

Suffixes: N outputs, K inputs.
"""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter

INT8_LINEAR = "int8_linear"
"""Name of the method at vLLM, as `AsyncEngineArgs.quantization`."""
MAX_INT8 = 127
Layer = Any
"""Linear layer of vLLM. torch's type does not know the attributes that vLLM adds."""


def quantized(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values and scales, in the dtype of the weights, whose product is nearest to the weights.

    Values are rounded with the scale that is stored, and so stay the nearest although the scale is rounded too.
    """
    amax_N = weight_NK.float().abs().amax(dim=1)
    scale_N = (amax_N / MAX_INT8).to(weight_NK.dtype)
    divisor_N1 = torch.where(scale_N == 0, 1.0, scale_N.float())[:, None]  # a row of zeros
    values_NK = (weight_NK.float() / divisor_N1).round().clamp(-MAX_INT8, MAX_INT8)
    return values_NK.to(torch.int8), scale_N


class Int8LinearMethod(LinearMethodBase):
    """Linear layer with int8 weights and unquantized activations."""

    uses_meta_device = True

    def create_weights(
        self,
        layer: Layer,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Declare the unquantized weights, which vLLM materializes once all of the layer's have arrived."""
        shape = (sum(output_partition_sizes), input_size_per_partition)
        weight_NK = ModelWeightParameter(
            data=torch.empty(shape, dtype=params_dtype, device="meta"),
            input_dim=1,
            output_dim=0,
            weight_loader=extra_weight_attrs["weight_loader"],
        )
        layer.register_parameter("weight", weight_NK)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Layer) -> None:
        """Quantize. vLLM calls this for each whole layer, and at the start again for the whole model."""
        if layer.weight.dtype == torch.int8:
            return
        values_NK, scale_N = quantized(layer.weight)
        layer.register_parameter("weight", nn.Parameter(values_NK, requires_grad=False))
        layer.register_parameter("weight_scale", nn.Parameter(scale_N, requires_grad=False))

    def apply(self, layer: Layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product. Every int8 value is exact in bfloat16, so only the scaling rounds."""
        product = nn.functional.linear(x, layer.weight.to(x.dtype)) * layer.weight_scale
        return product if bias is None else product + bias


@register_quantization_config(INT8_LINEAR)
class Int8LinearConfig(QuantizationConfig):
    """Choice of layers: all linear ones. Embeddings, and heads with them, stay unquantized, as in vLLM's fp8."""

    @classmethod
    def get_name(cls) -> Any:
        """Return vLLM's name of the method."""
        return INT8_LINEAR

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the dtypes in which a server computes."""
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the minimum capability of a GPU. Not read on a CPU."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no file: the method has no settings."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Int8LinearConfig":
        """Return the config. Model files with one are refused before (protocol/model_files.py)."""
        return cls()

    def get_quant_method(self, layer: Layer, prefix: str) -> LinearMethodBase | None:
        """Return the method of a linear layer. None for other layers, which vLLM then leaves unquantized."""
        return Int8LinearMethod() if isinstance(layer, LinearBase) else None
