"""Log-probs and entropies of a Megatron-core GPTModel without its logits.

torchrun --nproc-per-node 2 examples/megatron_logprobs.py
"""

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from grpo_kernels.integrations.megatron import output_processor


def main() -> float:
    device, ranks = torch.cuda.current_device(), parallel_state.get_tensor_model_parallel_world_size()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    options = {"use_cpu_initialization": True, "gradient_accumulation_fusion": False, "masked_softmax_fusion": False}
    config = TransformerConfig(**shape, **options, bias_dropout_fusion=False, tensor_model_parallel_size=ranks)
    model = GPTModel(config, get_gpt_layer_local_spec(), 512, 32, position_embedding_type="learned_absolute").to(device)
    ids, places = torch.randint(512, (4, 32), device=device), torch.arange(32, device=device).expand(4, 32)
    result = model(
        ids,
        places,
        attention_mask=torch.ones(1, 1, 32, 32, device=device).tril() == 0,  # True is masked
        labels=ids.roll(-1, 1),
        loss_mask=places < 31,  # the last token has no next one
        output_processor=output_processor,
        output_processor_context={"return_entropy": True},
    )
    (-result.logprobs.sum()).backward()
    return float(result.entropy.mean())


if __name__ == "__main__":
    torch.distributed.init_process_group()
    parallel_state.initialize_model_parallel(torch.distributed.get_world_size())
    print(main())
